"""Video decodes by recordings, on the CPU with recordings that replay by calling: which pieces are recorded, when, what
is said about it, and what makes room. The same with real CUDA graphs is in gpu/test_decode_capture_gpu.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ltx_runtime.cuda_graph import CaptureReport, GraphCache
from ltx_runtime.errors import CaptureError, MemoryShortageError, RequestError, RestartRequiredError
from ltx_runtime.tensor_tree import map_tensors, named_tensors
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import write_tiny_diffusion_vae
from ltx_runtime.video_vae import AskedSizes, DecodePlan, Tiling, VideoVAE, load_video_vae
from ltx_runtime.video_vae import decode as decode_module
from ltx_runtime.video_vae import recording as recording_module

TINY_CONV = Path(__file__).parent / "goldens" / "video_vae_conv_tiny.safetensors"
CPU = torch.device("cpu")
WHOLE = DecodePlan(99, 0, "set by a test", head_groups=2)
TILES = {"conv": Tiling((0, 0, 2), (0, 0, 1)), "diffusion": Tiling((7, 8, 8), (4, 4, 4))}
# A frame and a short clip; the latent channels come from the VAE.
SHAPES = {"conv": [(1, 1, 2), (3, 1, 3)], "diffusion": [(1, 3, 3), (3, 3, 4)]}


def tiny_vae(kind: str, folder: Path) -> VideoVAE:
    path = TINY_CONV if kind == "conv" else write_tiny_diffusion_vae(folder / "vae.safetensors")
    return load_video_vae(path, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module", params=["conv", "diffusion"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def plain(kind, tmp_path_factory) -> VideoVAE:
    return tiny_vae(kind, tmp_path_factory.mktemp("plain"))


@pytest.fixture
def recorded(plain, monkeypatch) -> VideoVAE:
    """Thinks it could capture."""
    monkeypatch.setattr(decode_module, "unavailable_reason", lambda device: None)
    monkeypatch.setattr(plain, "graphs", FakeCache(CPU, max_bytes=1000))
    return plain


@pytest.fixture
def conv(tmp_path, monkeypatch) -> VideoVAE:
    monkeypatch.setattr(decode_module, "unavailable_reason", lambda device: None)
    vae = tiny_vae("conv", tmp_path)
    vae.graphs = FakeCache(CPU, max_bytes=1000)
    return vae


def buffers_like(tree):
    return map_tensors(lambda _, t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t), tree)


class FakeRecording:
    """Replays by calling, over buffers of its own as a graph does; inputs that the function writes into would show."""

    def __init__(self, fn, inputs):
        self.fn, self.inputs = fn, buffers_like(inputs)
        fn(None, self.inputs)  # the warm-up pass
        self.outputs = buffers_like(fn(None, self.inputs))
        self.report = CaptureReport(static_bytes=2, graph_bytes=8)
        self.device_bytes = 10
        self.closed = False

    def load(self, constants, inputs):
        assert constants is None and not self.closed
        self._copy(self.inputs, inputs)

    def replay(self):
        self._copy(self.outputs, self.fn(None, self.inputs))
        return self.outputs

    def close(self):
        self.closed = True

    @staticmethod
    def _copy(buffers, tree):
        for (_, buffer), (_, value) in zip(named_tensors(buffers), named_tensors(tree), strict=True):
            buffer.copy_(value)


class FakeCache(GraphCache):
    """Records on the CPU, or fails to."""

    error: Exception | None = None

    def capture(self, key, fn, constants, inputs, phase, *, keep=()):
        assert constants is None
        if self.error is not None:
            raise self.error
        with phase("sample.warmup"), phase("sample.capture"):
            step = FakeRecording(fn, inputs)
        self._steps[key] = step
        self.counters.captures += 1
        while self.device_bytes > self.max_bytes and self.evict_oldest((*keep, step)):
            pass
        return step, step.outputs


class FakeEvent:
    """Of a clock that a test turns."""

    clock_ms = 0.0
    working = False

    def __init__(self, device):
        self.at_ms = self.clock_ms

    def query(self):
        return not self.working

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


@pytest.fixture
def clock(monkeypatch):
    """Device time passes only where a test says so."""
    monkeypatch.setattr(FakeEvent, "clock_ms", 0.0)
    monkeypatch.setattr(FakeEvent, "working", False)
    monkeypatch.setattr(recording_module, "_recorded_event", FakeEvent)
    return FakeEvent


def random_latent(vae: VideoVAE, sizes, seed: int = 0, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, vae.config.latent_channels, *sizes, generator=generator)


def decoded(vae: VideoVAE, latent: torch.Tensor, **settings) -> tuple[torch.Tensor, str]:
    """(frames, what was said about graphs)."""
    timeline = Timeline(None)
    frames = vae.decode(latent, timeline=timeline, **settings)
    timeline.child()  # raises if a phase were still open
    return frames, words_of(timeline)


def ran_eager(timeline: Timeline) -> bool:
    return any(event["attrs"].get("eager") for event in timeline.events if event["event"] == "note")


def words_of(timeline: Timeline) -> str:
    notes = [event["message"] for event in timeline.events if event["event"] == "note"]
    return "\n".join(note.removeprefix("CUDA graph: ") for note in notes if note.startswith("CUDA graph"))


# --- bits -----------------------------------------------------------------------------------------------------------


def plans(kind: str) -> list[DecodePlan]:
    tiled = DecodePlan(99, 0, "set by a test", TILES[kind], 1)
    return [WHOLE, tiled]


def test_recorded_decodes_of_two_shapes_in_turns_have_the_eager_bits(recorded, kind):
    for plan in plans(kind):
        latents = [random_latent(recorded, sizes, seed) for seed in range(3) for sizes in SHAPES[kind]]
        for latent in latents:
            frames, _ = decoded(recorded, latent, plan=plan, cuda_graph="on")
            assert torch.equal(frames, recorded.decode(latent, plan=plan, cuda_graph="off"))
    raw = recorded.decode_raw(latents[-1], plan=plan, cuda_graph="on")
    assert torch.equal(raw, recorded.decode_raw(latents[-1], plan=plan, cuda_graph="off"))
    counters = recorded.graphs.counters
    assert counters.hits > counters.captures >= 3


def test_a_clip_that_runs_whole_is_one_piece_recorded_once(recorded, kind):
    latents = [random_latent(recorded, SHAPES[kind][1], seed) for seed in range(3)]
    said = [decoded(recorded, latent, plan=WHOLE, cuda_graph="on")[1] for latent in latents]
    assert said[0].startswith("1 recorded of 1 pieces; recordings hold")
    assert said[2].startswith("1 replayed of 1 pieces")
    assert recorded.graphs.counters.captures == 1


def test_what_ran_eager_is_marked_in_the_notes(conv):
    latent = random_latent(conv, (3, 1, 2))
    marks = []
    for error in (None, None, CaptureError("capture failed: x")):
        timeline = Timeline(None)
        if error is not None:
            conv.graphs.error = error
            conv.graphs.close()
        conv.decode(latent, cuda_graph="on", timeline=timeline)
        marks.append(ran_eager(timeline))
    assert marks == [False, False, True]
    timeline = Timeline(None)
    conv.decode(latent, cuda_graph="on", graphs_refused="the host says no", timeline=timeline)
    assert ran_eager(timeline)


def test_the_clips_of_a_batch_are_one_recording(recorded, kind):
    latent = random_latent(recorded, SHAPES[kind][0], batch=3)
    frames, said = decoded(recorded, latent, plan=WHOLE, cuda_graph="on")
    assert said.startswith("1 recorded, 2 replayed of 3 pieces")
    assert torch.equal(frames, recorded.decode(latent, plan=WHOLE, cuda_graph="off"))


def test_tiles_alike_are_one_recording_and_their_noise_is_an_input(tmp_path, monkeypatch):
    monkeypatch.setattr(decode_module, "unavailable_reason", lambda device: None)
    vae = tiny_vae("diffusion", tmp_path)
    vae.graphs = FakeCache(CPU, max_bytes=1000)
    plan = DecodePlan(99, 0, "set by a test", Tiling((0, 8, 8), (0, 4, 4)), 1)
    latent = random_latent(vae, (1, 3, 3))
    frames, said = decoded(vae, latent, plan=plan, cuda_graph="on")
    assert "replayed of" in said and vae.graphs.counters.captures < vae.graphs.counters.hits + len(vae.graphs)
    assert torch.equal(frames, vae.decode(latent, plan=plan, cuda_graph="off"))


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_steady_chunk_is_recorded_once_and_replayed_through_the_stream(conv, chunk):
    plan = DecodePlan(chunk, 0, "set by a test")
    latents = [random_latent(conv, (28, 1, 1), seed) for seed in range(2)]
    expected = [conv.decode(latent, plan=plan, cuda_graph="off") for latent in latents]
    frames, said = decoded(conv, latents[0], plan=plan, cuda_graph="on")
    assert torch.equal(frames, expected[0])
    # 11 latent frames fill the stream; then every chunk is as the one before; the last is another.
    pieces = -(-28 // chunk) - -(-11 // chunk)
    assert said.startswith(f"2 recorded, {pieces - 2} replayed of {pieces} pieces") and len(conv.graphs) == 2
    frames, said = decoded(conv, latents[1], plan=plan, cuda_graph="on")
    assert torch.equal(frames, expected[1]) and said.startswith(f"{pieces} replayed of {pieces} pieces")


def test_streams_of_two_lengths_share_what_is_alike(conv):
    plan = DecodePlan(2, 0, "set by a test")
    for frames in (20, 24):
        decoded(conv, random_latent(conv, (frames, 1, 1)), plan=plan, cuda_graph="on")
    assert conv.graphs.counters.captures == 2
    decoded(conv, random_latent(conv, (23, 1, 1)), plan=plan, cuda_graph="on")
    assert conv.graphs.counters.captures == 3  # its last chunk is shorter


# --- when -----------------------------------------------------------------------------------------------------------


def host_and_device(monkeypatch, vae: VideoVAE, clock, issue_ms: float, device_ms: float) -> None:
    """Every eager piece takes the host and the device as long."""
    real = vae._decoding.pieces
    now = [0.0]
    monkeypatch.setattr(recording_module.time, "perf_counter", lambda: now[0])

    def pieces(*arguments):
        now[0] += issue_ms / 1e3
        clock.clock_ms += device_ms
        yield from real(*arguments)

    class Slow(recording_module.PieceRecorder):
        def eager(self, eager):
            def work():
                now[0] += issue_ms / 1e3
                clock.clock_ms += device_ms
                yield from eager

            return super().eager(work())

    monkeypatch.setattr(decode_module, "PieceRecorder", Slow)


@pytest.mark.parametrize(
    "issue_ms, device_ms, records", [(9, 46, False), (9, 9.5, True), (80, 135, False), (8, 8, True)]
)
def test_auto_decides_at_the_third_use_by_the_times_of_the_second(
    recorded, kind, clock, monkeypatch, issue_ms, device_ms, records
):
    host_and_device(monkeypatch, recorded, clock, issue_ms, device_ms)
    recorded.graphs.forget_measurements()
    latent = random_latent(recorded, SHAPES[kind][0])
    said = [decoded(recorded, latent, plan=WHOLE)[1] for _ in range(4)]
    assert said[0] == "eager, this shape is new: its second use is timed" and said[1] == "eager, timed for its next use"
    times = f"host issues in {issue_ms:.1f} ms, device works {device_ms:.1f}"
    if records:
        assert said[2].startswith("1 recorded of 1 pieces")
        assert said[2].endswith(f"{times}: the host is the limit, recorded")
        assert said[3].startswith("1 replayed of 1 pieces")
    else:
        assert said[2] == said[3] == f"eager, {times}: not recorded"
    assert recorded.graphs.counters.captures == records


def test_auto_records_a_steady_chunk_inside_its_first_clip(conv, clock, monkeypatch):
    host_and_device(monkeypatch, conv, clock, 10, 10)
    plan = DecodePlan(1, 0, "set by a test")
    latent = random_latent(conv, (28, 1, 1))
    expected = conv.decode(latent, plan=plan, cuda_graph="off")
    frames, said = decoded(conv, latent, plan=plan)
    assert torch.equal(frames, expected)
    assert said.startswith("1 recorded, ") and conv.graphs.counters.captures == 1 and "replayed, " in said


@pytest.mark.parametrize("lose", [lambda vae: vae.evict(), lambda vae: vae.graphs.close()], ids=["VAE", "recordings"])
def test_auto_records_anew_what_is_used_thrice_not_what_is_lost_with_every_render(conv, clock, monkeypatch, lose):
    host_and_device(monkeypatch, conv, clock, 10, 10)
    latent = random_latent(conv, (3, 1, 2))
    for _ in range(4):
        decoded(conv, latent)
    lose(conv)
    said = [decoded(conv, latent)[1] for _ in range(3)]
    assert said[0] == "eager, this shape is new: its second use is timed" and said[1] == "eager, timed for its next use"
    assert said[2].startswith("1 recorded") and conv.graphs.counters.captures == 2


def test_auto_waits_for_no_device_to_decide(recorded, kind, clock, monkeypatch):
    host_and_device(monkeypatch, recorded, clock, 10, 10)
    recorded.graphs.forget_measurements()
    latent = random_latent(recorded, SHAPES[kind][0])
    for _ in range(2):
        decoded(recorded, latent, plan=WHOLE)
    clock.working = True
    assert decoded(recorded, latent, plan=WHOLE)[1] == "eager, the device still works on the piece that is timed"
    clock.working = False
    assert decoded(recorded, latent, plan=WHOLE)[1].startswith("1 recorded")


def test_a_decode_that_was_cancelled_times_nothing(conv, clock):
    latent = random_latent(conv, (5, 1, 1), batch=2)
    calls = []

    def cancel():
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt

    decoded(conv, latent[:1], plan=WHOLE)
    with pytest.raises(KeyboardInterrupt):
        conv.decode(latent, plan=WHOLE, check_cancelled=cancel)
    assert decoded(conv, latent[:1], plan=WHOLE)[1] == "eager, timed for its next use"


# --- what can go wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [CaptureError("capture failed: x"), MemoryShortageError("not captured: no memory")])
def test_a_failed_capture_is_said_and_tried_once_a_decode(conv, error):
    plan = DecodePlan(2, 0, "set by a test")
    latent = random_latent(conv, (20, 1, 1))
    conv.graphs.error = error
    frames, said = decoded(conv, latent, plan=plan, cuda_graph="on")
    assert torch.equal(frames, conv.decode(latent, plan=plan, cuda_graph="off")) and said == f"eager, {error}"
    assert conv.graphs.counters.misses == 1
    conv.graphs.error = None
    assert "recorded" in decoded(conv, latent, plan=plan, cuda_graph="on")[1]


def test_a_process_that_cannot_go_on_says_so(conv):
    conv.graphs.error = RestartRequiredError("restart ComfyUI: CUDA error: out of memory")
    with pytest.raises(RestartRequiredError):
        conv.decode(random_latent(conv, (1, 1, 1)), cuda_graph="on")


def test_a_replay_can_be_cancelled_before_it_begins_and_tells_of_its_work(recorded, kind):
    latent = random_latent(recorded, SHAPES[kind][1])
    recorded.decode(latent, plan=WHOLE, cuda_graph="on")
    told = []
    recorded.decode(latent, plan=WHOLE, cuda_graph="on", on_progress=lambda *counts: told.append(counts))
    assert told[-1] == (17, 17)

    def cancel():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorded.decode(latent, plan=WHOLE, cuda_graph="on", check_cancelled=cancel)
    assert recorded.graphs.counters.hits == 1


def test_weights_that_were_read_again_are_recorded_again(recorded, kind):
    latent = random_latent(recorded, SHAPES[kind][0])
    recorded.decode(latent, plan=WHOLE, cuda_graph="on")
    recorded.evict()
    assert len(recorded.graphs) == 0
    recorded.decode(latent, plan=WHOLE, cuda_graph="on")
    assert recorded.graphs.counters.captures == 2


def test_other_kernels_are_another_recording(conv, monkeypatch):
    latent = random_latent(conv, (1, 1, 1))
    conv.decode(latent, cuda_graph="on")
    monkeypatch.setattr(decode_module, "triton_refusal", lambda *_: "broken since")
    conv.decode(latent, cuda_graph="on")
    assert conv.graphs.counters.captures == 2


def test_without_cuda_only_on_is_answered_with_the_reason(conv, monkeypatch):
    latent = random_latent(conv, (1, 1, 1))
    assert decoded(conv, latent, cuda_graph="on", graphs_refused="the host says no")[1] == "eager, the host says no"
    monkeypatch.undo()
    assert "CUDA" in decoded(conv, latent, cuda_graph="on")[1] and decoded(conv, latent)[1] == ""
    with pytest.raises(RequestError, match="cuda_graph='always' is not one of auto, on, off"):
        conv.decode(latent, cuda_graph="always")


# --- memory ---------------------------------------------------------------------------------------------------------


def free_memory(monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr(decode_module, "device_free_bytes", lambda device: num_bytes)


def test_a_recording_needs_room_beside_the_decode_and_others_make_way(conv, monkeypatch):
    small, large = random_latent(conv, (1, 1, 1)), random_latent(conv, (1, 2, 2))
    plan = DecodePlan(99, 50, "set by a test", recording_bytes=30)
    conv.decode(small, plan=WHOLE, cuda_graph="on")
    free_memory(monkeypatch, 79)
    said = decoded(conv, large, plan=plan, cuda_graph="on")[1]
    assert "a recording takes about 0.0 MiB beside the 0.0 MiB of the decode, and 0.0 MiB are free" in said
    assert len(conv.graphs) == 0 and conv.graphs.counters.evictions == 1
    free_memory(monkeypatch, 80)
    assert decoded(conv, large, plan=plan, cuda_graph="on")[1].startswith("1 recorded")


def test_the_recordings_of_one_decode_stay_within_the_bound(conv):
    conv.graphs = FakeCache(CPU, max_bytes=500)
    plan = DecodePlan(1, 0, "set by a test", recording_bytes=495)
    latent = random_latent(conv, (20, 1, 1))
    frames, said = decoded(conv, latent, plan=plan, cuda_graph="on")
    assert said.startswith("1 recorded, 7 replayed, 1 eager of 9 pieces; ")
    assert "not recorded: the recordings of this decode hold 0.0 MiB, of the 0.0 MiB that all may take" in said
    assert torch.equal(frames, conv.decode(latent, plan=plan, cuda_graph="off"))


def test_recordings_leave_before_an_eager_decode_runs_short(conv, monkeypatch):
    latent = random_latent(conv, (1, 1, 1))
    conv.decode(latent, plan=WHOLE, cuda_graph="on")
    free_memory(monkeypatch, 50)
    assert decoded(conv, latent, plan=DecodePlan(99, 50, "fits"), cuda_graph="off")[1] == ""
    said = decoded(conv, latent, plan=DecodePlan(99, 51, "does not"), cuda_graph="off")[1]
    assert "dropped, to make room" in said and len(conv.graphs) == 0


def test_a_plan_does_not_depend_on_what_is_recorded(recorded, kind, monkeypatch):
    shape = random_latent(recorded, SHAPES[kind][1]).shape
    free_memory(monkeypatch, 10**7)
    before = recorded.plan(shape)
    recorded.decode(random_latent(recorded, SHAPES[kind][0]), plan=WHOLE, cuda_graph="on")
    # A recording of 10 bytes, of which statistics count 8 as free under the native allocator.
    for backend, left in (("native", 10**7 - 2), ("cudaMallocAsync", 10**7 - 10)):
        monkeypatch.setattr("ltx_runtime.cuda_graph.allocator_backend", lambda backend=backend: backend)
        free_memory(monkeypatch, left)
        assert recorded.plan(shape) == before


def test_out_of_memory_drops_the_recordings_first_and_runs_the_same_plan_again(conv):
    latent = random_latent(conv, (5, 1, 1))
    conv.decode(random_latent(conv, (1, 1, 1)), cuda_graph="on")
    expected = conv.decode(latent, cuda_graph="off")

    def full(layer, args):
        if len(conv.graphs):
            raise torch.OutOfMemoryError("the recordings hold too much")

    conv.module.decoder.conv_out.register_forward_pre_hook(full)
    ran = []
    frames, said = decoded(conv, latent, cuda_graph="off", on_plan=ran.append)
    assert torch.equal(frames, expected) and len(ran) == 2 and ran[0] == ran[1]
    assert "out of memory beside recordings of 0.0 MiB: dropped, once more" in said and len(conv.graphs) == 0


def test_a_plan_knows_what_its_recording_takes(plain, kind):
    shape = random_latent(plain, (16, 8, 12)).shape
    whole = plain.plan(shape, free_bytes=1 << 50)
    assert whole.recording_bytes > 0.5 * whole.peak_bytes
    tiles = AskedSizes(tile_size=192, temporal_size=64, temporal_overlap=16)
    tiled = plain.plan(shape, free_bytes=1 << 50, sizes=tiles)
    assert tiled.tiling and 0 < tiled.recording_bytes < whole.recording_bytes


def test_room_is_asked_for_a_recording_only_as_far_as_none_is_held(plain, monkeypatch):
    """Those that are held are replayed or make way: asked for again, their memory would cost another model its
    place."""
    shape = (1, plain.config.latent_channels, 3, 4, 4)
    least, recorded = plain.exact_bytes(shape), plain.exact_bytes(shape, recorded=True)
    assert recorded > least
    for held, asked in ((1, recorded - 1), (recorded - least, least), (1 << 50, least)):
        monkeypatch.setattr(type(plain.graphs), "device_bytes", held)
        assert plain.exact_bytes(shape, recorded=True) == asked
        assert plain.exact_bytes(shape) == least
