"""Which recordings a cache keeps, by number and by memory; how many a render has."""
import contextlib
from dataclasses import dataclass

import pytest
import torch
from tiny_sampling import FPS, tiny_model, tiny_request, video_shape

from ltx_runtime import cuda_graph
from ltx_runtime.conditioning import text_to_video_state
from ltx_runtime.cuda_graph import GraphCache, GraphKey
from ltx_runtime.errors import MemoryShortageError, RestartRequiredError
from ltx_runtime.guidance import Guidance, GuidanceSpec
from ltx_runtime.sampler import prepare
from ltx_runtime.timing import Timeline

CPU = torch.device("cpu")


@dataclass
class Recording:
    device_bytes: int
    closed: bool = False

    def close(self):
        self.closed = True


def key(name: str) -> GraphKey:
    return GraphKey((), (("name", name),), 1)


@pytest.fixture
def recorder(monkeypatch):
    """Recordings without a device. `free`: memory left on it, None for plenty."""

    class Recorder:
        def __init__(self):
            self.free, self.size, self.held = None, 10, []

        def record(self, *_):
            used = sum(recording.device_bytes for recording in self.held if not recording.closed)
            if self.free is not None and used + self.size > self.free:
                raise MemoryShortageError("full")
            self.held.append(Recording(self.size))
            return self.held[-1], "outputs"

    recorder = Recorder()
    monkeypatch.setattr(cuda_graph, "_record", recorder.record)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    return recorder


def capture(cache: GraphCache, name: str, keep=()):
    assert cache.find(key(name)) is None
    return cache.capture(key(name), None, None, None, lambda phase: contextlib.nullcontext(), keep=keep)[0]


def kept(cache: GraphCache, names: str) -> str:
    return "".join(name for name in names if key(name) in cache._steps)


def test_the_least_recently_used_goes_first(recorder):
    cache = GraphCache(CPU, max_graphs=3, max_bytes=1000)
    for name in "abc":
        capture(cache, name)
    cache.find(key("a"))
    capture(cache, "d")
    assert kept(cache, "abcd") == "acd" and cache.counters.evictions == 1
    assert [recording.closed for recording in recorder.held] == [False, True, False, False]


def test_memory_bounds_them_too_but_for_those_that_are_needed(recorder):
    cache = GraphCache(CPU, max_bytes=25)
    a, b = capture(cache, "a"), capture(cache, "b")
    capture(cache, "c")
    assert kept(cache, "abc") == "bc" and a.closed
    d = capture(cache, "d", keep=(b,))
    assert kept(cache, "bcd") == "bd"
    # All of one render: together over the bound, and still all there.
    e = capture(cache, "e", keep=(b, d))
    assert kept(cache, "bde") == "bde" and not any(recording.closed for recording in (b, d, e))
    capture(cache, "f")
    assert kept(cache, "bdef") == "ef"


def test_a_recording_larger_than_the_bound_stays_alone(recorder):
    cache = GraphCache(CPU, max_bytes=25)
    capture(cache, "a")
    recorder.size = 40
    capture(cache, "b")
    assert kept(cache, "ab") == "b"


def test_on_a_full_card_old_ones_make_room_and_needed_ones_never(recorder):
    cache = GraphCache(CPU, max_bytes=1000)
    recorder.free = 25
    a, b = capture(cache, "a"), capture(cache, "b")
    capture(cache, "c", keep=(a,))
    assert kept(cache, "abc") == "ac" and b.closed
    with pytest.raises(MemoryShortageError):
        capture(cache, "d", keep=recorder.held)
    assert kept(cache, "acd") == "ac" and cache.counters.fallbacks == 1


def kinds(request) -> set[GraphKey]:
    """Keys of all steps of a render."""
    with torch.inference_mode():
        prepared = prepare(tiny_model(), request, Timeline(None))
        return {
            GraphKey.of(
                (prepared.constants[index], prepared.inputs(index, prepared.start, prepared.start)), weight_generation=1
            )
            for index in range(len(prepared.constants))
        }


def test_the_largest_guided_two_stage_render_fits_with_room_for_another():
    """res_2s with every pass, sound and picture skipping at different steps; a second stage of two frames more."""
    spec = GuidanceSpec(3.0, stg_scale=1.0, modality_scale=3.0, rescale=0.7, stg_blocks=(1,), skip_step=1)
    other = GuidanceSpec(5.0, stg_scale=1.0, modality_scale=3.0, stg_blocks=(1,), skip_step=2)
    settings = {"guidance": Guidance(spec, other, "batched"), "sigmas": torch.linspace(1, 0, 9), "sampler": "res_2s"}
    first = kinds(tiny_request(**settings))
    second = kinds(tiny_request(**settings, video=text_to_video_state(video_shape(5), FPS)))
    assert len(first) == len(second) == 5 and not first & second
    assert len(first | second) + 5 <= GraphCache(CPU).max_graphs


def test_a_library_without_memory_leaves_the_render_eager_and_no_other_error_does(monkeypatch):
    def raising(error):
        def recorded(*_):
            raise error

        monkeypatch.setattr(cuda_graph, "_recorded", recorded)
        cuda_graph._record(None, None, None, None, CPU, None)

    monkeypatch.setattr(cuda_graph, "_check_health", lambda device: None)
    with pytest.raises(MemoryShortageError, match="not captured: CUBLAS_STATUS_ALLOC_FAILED"):
        raising(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    with pytest.raises(RestartRequiredError, match="out of memory"):
        raising(RestartRequiredError("restart ComfyUI: CUDA error: out of memory"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        raising(RuntimeError("size mismatch"))
