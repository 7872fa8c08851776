"""Video decodes by CUDA graphs equal eager ones bit for bit, fall back with a reason, and give their memory back. Run
under both allocators:

    python3 -m pytest tests/gpu/test_decode_capture_gpu.py
    PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync python3 -m pytest tests/gpu/test_decode_capture_gpu.py
"""
from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from ltx_runtime.cuda_graph import held_bytes
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import write_tiny_diffusion_vae
from ltx_runtime.video_vae import DecodePlan, Tiling, VideoVAE, load_video_vae
from ltx_runtime.video_vae import recording as recording_module

TINY_CONV = Path(__file__).parents[1] / "goldens" / "video_vae_conv_tiny.safetensors"
WHOLE = DecodePlan(99, 0, "set by a test", head_groups=2)
TILES = {
    "conv": DecodePlan(99, 0, "set by a test", Tiling((0, 4, 4), (0, 2, 2))),
    "diffusion": DecodePlan(99, 0, "set by a test", Tiling((7, 8, 8), (4, 4, 4)), 1),
}
# One frame, and two clips of odd sizes.
SHAPES = [(1, 3, 5), (4, 7, 6), (3, 5, 8)]
REPLAYS = 3


@pytest.fixture(scope="module")
def vaes(tmp_path_factory) -> dict[str, VideoVAE]:
    """In bfloat16, on the kernels."""
    diffusion = write_tiny_diffusion_vae(tmp_path_factory.mktemp("vaes") / "diffusion.safetensors")
    return {
        "conv": load_video_vae(TINY_CONV, device="cuda", dtype=torch.bfloat16),
        "diffusion": load_video_vae(diffusion, device="cuda", dtype=torch.bfloat16),
    }


@pytest.fixture(params=["conv", "diffusion"])
def vae(request, vaes) -> VideoVAE:
    """Without recordings and measurements."""
    vae = vaes[request.param]
    vae.graphs.forget_measurements()
    vae.graphs.counters.captures = vae.graphs.counters.hits = vae.graphs.counters.fallbacks = 0
    yield vae
    vae.graphs.close()


def kind_of(vae: VideoVAE) -> str:
    return "diffusion" if vae.takes_noise else "conv"


def random_latent(vae: VideoVAE, sizes, seed: int = 0, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(batch, vae.config.latent_channels, *sizes, generator=generator, device="cuda")


def decoded(vae: VideoVAE, latent: torch.Tensor, plan: DecodePlan, cuda_graph: str = "on") -> tuple[torch.Tensor, str]:
    """(unclamped pixels, what was said about graphs)."""
    timeline = Timeline(None, device=vae.device)
    pixels = vae.decode_raw(latent, plan=plan, cuda_graph=cuda_graph, timeline=timeline)
    notes = [event["message"] for event in timeline.events if event["event"] == "note"]
    return pixels, "\n".join(note for note in notes if note.startswith("CUDA graph"))


def assert_recorded_equals_eager(vae: VideoVAE, latents: list[torch.Tensor], plan: DecodePlan) -> None:
    """Every latent eager, then recorded or replayed, then eager again."""
    eager = [decoded(vae, latent, plan, "off")[0] for latent in latents]
    assert not any(torch.equal(eager[0], other) for other in eager[1:])
    for latent, expected in zip(latents, eager):
        pixels, words = decoded(vae, latent, plan)
        assert torch.equal(pixels, expected), words
        assert " eager" not in words, words
    for latent, expected in zip(latents, eager):
        assert torch.equal(decoded(vae, latent, plan, "off")[0], expected), "eager changed after the capture"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_clip_that_runs_whole(vae, shape):
    assert_recorded_equals_eager(vae, [random_latent(vae, shape, seed) for seed in range(1 + REPLAYS)], WHOLE)
    assert (vae.graphs.counters.captures, vae.graphs.counters.hits) == (1, REPLAYS)


def test_tiles(vae):
    latents = [random_latent(vae, (4, 7, 6), seed) for seed in range(1 + REPLAYS)]
    assert_recorded_equals_eager(vae, latents, TILES[kind_of(vae)])
    assert vae.graphs.counters.hits >= REPLAYS * vae.graphs.counters.captures > 0


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_stream_with_steady_chunks(vaes, chunk):
    vae = vaes["conv"]
    vae.graphs.close()
    hits = vae.graphs.counters.hits
    latents = [random_latent(vae, (24, 3, 5), seed) for seed in range(1 + REPLAYS)]
    assert_recorded_equals_eager(vae, latents, DecodePlan(chunk, 0, "set by a test"))
    assert len(vae.graphs) == 2 and vae.graphs.counters.hits - hits > REPLAYS * 2
    vae.graphs.close()


def test_the_clips_of_a_batch_and_frames_on_the_host(vae):
    latent = random_latent(vae, SHAPES[2], batch=3)
    expected = vae.decode(latent, plan=WHOLE, cuda_graph="off")
    for _ in range(2):
        assert torch.equal(vae.decode(latent, plan=WHOLE, cuda_graph="on"), expected)
    assert (vae.graphs.counters.captures, vae.graphs.counters.hits) == (1, 5)


def test_two_shapes_in_turns(vae):
    latents = [random_latent(vae, shape, seed) for seed in range(3) for shape in SHAPES[:2]]
    eager = [decoded(vae, latent, WHOLE, "off")[0] for latent in latents]
    for latent, expected in zip(latents, eager):
        assert torch.equal(decoded(vae, latent, WHOLE)[0], expected)
    assert (vae.graphs.counters.captures, vae.graphs.counters.hits) == (2, 4)


def test_a_piece_that_cannot_be_recorded_runs_eager_and_says_why(vae):
    latent = random_latent(vae, SHAPES[1])
    expected = decoded(vae, latent, WHOLE, "off")[0]
    layer = vae.module.decoder.norm_out if vae.takes_noise else vae.module.decoder.conv_out
    capturing = torch.cuda.is_current_stream_capturing

    def waits(module, args):
        if capturing():
            torch.zeros(1, device="cuda").item()

    hook = layer.register_forward_pre_hook(waits)
    pixels, words = decoded(vae, latent, WHOLE)
    hook.remove()
    assert torch.equal(pixels, expected) and "item waits for the device" in words and len(vae.graphs) == 0
    assert vae.graphs.counters.fallbacks == 1
    assert torch.equal(decoded(vae, latent, WHOLE)[0], expected) and len(vae.graphs) == 1


def test_what_a_recording_held_comes_back(vae, device):
    latents = [random_latent(vae, (9, 16, 16)), random_latent(vae, SHAPES[1])]
    held, left, allocated = [], [], []
    for _ in range(4):
        for latent in latents:
            decoded(vae, latent, WHOLE)
        held.append(vae.graphs.device_bytes)
        assert len(vae.graphs) == 2 and held[-1] > 0
        vae.graphs.close()
        gc.collect()
        torch.cuda.empty_cache()
        left.append(held_bytes(device))
        allocated.append(torch.cuda.memory_allocated(device))
    # In the first round libraries take their workspace. Against the least of all rounds, since memory that happened to
    # be held at the start would hide as much of a leak.
    words = f"held {held}, then left {left}, of it allocated {allocated}"
    assert max(left[1:]) - min(left) <= max(held[-1] // 10, 64 << 20), words
    assert max(allocated[1:]) - min(allocated[1:]) <= 1 << 20, words
    assert vae.graphs.device_bytes == 0


@pytest.mark.parametrize("sizes", [(9, 16, 16), (4, 7, 6)])
def test_a_recording_takes_no_more_than_its_plan_says(vae, sizes):
    """At tiny widths what libraries take for themselves weighs most: 32 MiB are left to that."""
    latent = random_latent(vae, sizes)
    plan = vae.plan(latent.shape, free_bytes=1 << 40)
    decoded(vae, latent, plan)
    held = sum(step.device_bytes for step in vae.graphs._steps.values())
    assert 0 < held <= len(vae.graphs) * (plan.recording_bytes + (32 << 20)), (held >> 20, plan.recording_bytes >> 20)


@pytest.fixture
def device_takes(monkeypatch):
    """device_takes(ms): what auto is told of the device from then on, whatever the host's speed and load. All else is
    real."""

    def set_to(told_ms: float) -> None:
        real = recording_module._recorded_event

        class Told:
            def __init__(self, device):
                self.event = real(device)

            def query(self) -> bool:
                return self.event.query()

            def elapsed_time(self, end) -> float:
                assert self.event.elapsed_time(end.event) > 0
                return told_ms

        monkeypatch.setattr(recording_module, "_recorded_event", Told)

    return set_to


@pytest.mark.parametrize("device_ms, records", [(1e-3, True), (1e6, False)])
def test_auto_times_the_second_use_and_goes_by_it(vae, device_takes, device_ms, records):
    device_takes(device_ms)
    latent = random_latent(vae, SHAPES[0])
    expected = decoded(vae, latent, WHOLE, "off")[0]
    said = []
    for _ in range(4):
        pixels, words = decoded(vae, latent, WHOLE, "auto")
        assert torch.equal(pixels, expected)
        said.append(words)
    print("\n" + "\n".join(said))
    assert "this shape is new" in said[0] and "timed for its next use" in said[1]
    assert f"device works {device_ms:.1f}: " in said[2] and "host issues in 0.0 ms" not in said[2]
    if records:
        assert said[2].startswith("CUDA graph: 1 recorded of 1 pieces") and "the host is the limit" in said[2]
        assert said[3].startswith("CUDA graph: 1 replayed of 1 pieces")
    else:
        assert said[2] == said[3] and said[2].endswith(": not recorded")
    assert (vae.graphs.counters.captures, vae.graphs.counters.hits) == ((1, 1) if records else (0, 0))


def test_auto_leaves_a_busy_device_alone(vae):
    latent = random_latent(vae, SHAPES[0])

    def spin(*_):
        torch.cuda._sleep(1_000_000_000)  # half a second and more

    hook = vae.module.decoder.conv_in.register_forward_pre_hook(spin)
    for _ in range(2):
        decoded(vae, latent, WHOLE, "auto")
    hook.remove()
    words = decoded(vae, latent, WHOLE, "auto")[1]
    assert words.endswith(": not recorded") and "host issues in" in words and len(vae.graphs) == 0, words


def test_evicted_weights_take_their_recordings_along(tmp_path):
    vae = load_video_vae(write_tiny_diffusion_vae(tmp_path / "d.safetensors"), device="cuda", dtype=torch.bfloat16)
    latent = random_latent(vae, SHAPES[0])
    first = decoded(vae, latent, WHOLE)[0]
    vae.evict()
    assert len(vae.graphs) == 0
    assert torch.equal(decoded(vae, latent, WHOLE)[0], first)
    vae.evict()
