"""The denoiser on its fused passes: as exact as plain bf16, and a capture gives the bits of eager. Run under both
allocators, as test_cuda_graph.py.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from ltx_runtime.conditioning import append_keyframe, audio_state, replace_frame, text_to_video_state
from ltx_runtime.config import TransformerConfig
from ltx_runtime.cuda_graph import GraphKey
from ltx_runtime.resident_weights import build_on_meta
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape
from ltx_runtime.tensor_tree import map_tensors
from ltx_runtime.tiny import fill_random, tiny_transformer_config
from ltx_runtime.transformer import ForwardConstants, LTXTransformer, StepModulation
from ltx_runtime.transformer.residual import ResidualStream

# width, tokens: the published streams, odd token counts, a width that no vector load divides
STREAMS = [(4096, 1537), (2048, 127), (96, 33), (33, 5)]
LEVELS = ["one", "two", "per token"]
CASES = {
    "text to video": {},
    "image": {"given": (0, 1.0)},
    "keyframe": {"given": (9, 0.7)},
    "soft mask": {"soft": True},
    "two samples": {"batch": 2, "sigmas": (0.9, 0.3)},
    "perturbed": {"batch": 2, "perturbed": True},
    "comfyui": {"compatibility": "comfyui"},
    "sound given": {"audio_enabled": False},
    "no sound": {"audio": False},
}


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def transformer() -> LTXTransformer:
    """Two layers of tiny widths: the names, and every pass between them, are those of the published model."""
    return filled(tiny_transformer_config())


@pytest.fixture(scope="module")
def wide_transformer() -> LTXTransformer:
    """Two layers of the published widths."""
    heads = {"video_heads": 32, "video_head_dim": 128, "audio_heads": 32, "audio_head_dim": 64}
    config = dataclasses.replace(
        tiny_transformer_config(), **heads, context_width=4096, audio_context_width=2048,
        video_connector=None, audio_connector=None,
    )  # fmt: skip
    return filled(config)


def filled(config: TransformerConfig) -> LTXTransformer:
    module = build_on_meta(lambda: LTXTransformer(config))
    fill_random(module, device="cuda")
    return module


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def prepared(
    model: LTXTransformer, *, batch=1, given=None, soft=False, perturbed=False, audio=True, sigmas=(0.7,), **options
) -> tuple[tuple[Tensor | None, Tensor | None], ForwardConstants, StepModulation]:
    """Tokens of both streams, constants and modulation of a request of odd token counts."""
    c = model.config
    shape = VideoLatentShape(batch, c.in_channels, 3, 3, 5)
    video = text_to_video_state(shape, 24.0).to("cuda")
    if given is not None:
        frame, strength = given
        add = replace_frame if frame == 0 else append_keyframe
        options_of_frame = (strength,) if frame == 0 else (24.0, strength)
        video = add(video, frame, random(batch, c.in_channels, 1, 3, 5, seed=1), *options_of_frame)
    if soft:
        mask = torch.linspace(0.05, 1, video.tokens, device="cuda").reshape(1, -1, 1)
        video = dataclasses.replace(video, denoise_mask=mask)
    sound = audio_state(AudioLatentShape(batch, 8, 7, c.audio_in_channels // 8)).to("cuda") if audio else None
    if perturbed:
        keep = torch.ones(4, c.num_layers, batch)
        keep[:3, 0, 0], keep[3, 1] = 0, 0
        options["perturbations"] = keep
    constants = model.prepare(
        video=video,
        audio=sound,
        video_context=random(batch, 11, c.context_width, seed=2),
        audio_context=random(batch, 11, c.audio_context_width, seed=3),
        per_sample_sigma=len(sigmas) > 1,
        **options,
    )
    modulation = model.modulation(constants, torch.tensor(sigmas, device="cuda"))
    tokens = (
        random(batch, video.tokens, c.in_channels, seed=4),
        random(batch, sound.tokens, c.audio_in_channels, seed=5) if audio else None,
    )
    return tokens, constants, modulation


def floats(tree):
    return map_tensors(lambda _, tensor: tensor.float() if tensor.is_floating_point() else tensor, tree)


def assert_as_exact(model: LTXTransformer, case: str, slack: float) -> None:
    """Squared distances from float32 over a few inputs."""
    tokens, constants, modulation = prepared(model, **CASES[case])
    assert constants.fused
    plain = dataclasses.replace(constants, fused=False)
    wide = copy.deepcopy(model).float()
    sums = torch.zeros(3, 2, dtype=torch.float64)  # fused, plain, size; by stream
    for seed in range(4):
        inputs = [t if t is None else random(*t.shape, seed=20 + seed) for t in tokens]
        exact = wide(*inputs, floats(plain), floats(modulation))
        for row, found in enumerate((model(*inputs, constants, modulation), model(*inputs, plain, modulation))):
            for stream, (ours, right) in enumerate(zip(found, exact, strict=True)):
                if right is not None:
                    sums[row, stream] += (ours.double() - right.double()).square().sum().cpu()
        sums[2] += torch.tensor([0 if right is None else right.double().square().sum().item() for right in exact])
    fused, plain_error, size = sums.sqrt()
    assert (fused <= slack * plain_error).all() and (plain_error <= 0.05 * size).all() and fused.any(), sums.sqrt()


@pytest.mark.parametrize("case", CASES)
def test_a_pass_is_as_exact_as_the_plain_one(transformer, case):
    # Tiny widths: which roundings add up and which cancel is a matter of luck, up to a seventh either way.
    assert_as_exact(transformer, case, slack=1.2)


@pytest.mark.parametrize("case", ["text to video", "image", "soft mask"])
def test_a_pass_of_published_widths_is_as_exact_as_the_plain_one(wide_transformer, case):
    assert_as_exact(wide_transformer, case, slack=1.05)


@pytest.mark.parametrize("case", CASES)
def test_replays_of_a_capture_give_the_bits_of_eager(transformer, device, case):
    """All that goes through the kernels is made inside the capture."""
    (video, audio), constants, modulation = prepared(transformer, **CASES[case])

    def run() -> list[Tensor]:
        return [v for v in transformer(video, audio, constants, modulation) if v is not None]

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = run()
    seen = []
    for seed in range(3):
        for tokens in (video, audio):
            if tokens is not None:
                tokens.copy_(random(*tokens.shape, seed=10 + seed))
        graph.replay()
        seen.append([v.clone() for v in out])
        torch.cuda.synchronize()
        assert all(map(torch.equal, seen[-1], run()))
    assert not torch.equal(seen[0][0], seen[1][0])
    del out
    graph.reset()


def stream_of(width: int, tokens: int, levels: str, fused: bool) -> tuple[ResidualStream, list[Tensor], list[Tensor]]:
    """A stream of two samples, outputs for it, and modulation rows."""
    index = None
    count = {"one": 1, "two": 2, "per token": 2 * tokens}[levels]
    if levels != "one":
        index = torch.arange(2 * tokens, device="cuda").reshape(2, tokens) % count
    x, *outs = (random(2, tokens, width, seed=seed).bfloat16() for seed in range(3))
    rows = [random(count, width, seed=seed).bfloat16() for seed in range(5)]
    return ResidualStream(x, index, 1e-6, fused), outs, rows


@pytest.mark.parametrize("width, tokens", STREAMS)
@pytest.mark.parametrize("levels", LEVELS)
def test_one_pass_rounds_once(width, tokens, levels):
    stream, (out, _), rows = stream_of(width, tokens, levels, fused=True)
    x, index = stream.tokens().double(), stream._index

    def of_tokens(row: Tensor) -> Tensor:
        return row.double()[:, None] if index is None else row.double()[index]

    stream.add(out, rows[0])
    found = stream.normed((rows[1], rows[2]), (rows[3], rows[4]))
    x = (x + out.double() * of_tokens(rows[0])).bfloat16()
    assert torch.equal(stream.tokens(), x)
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    for y, (scale, shift) in zip(found, ((rows[1], rows[2]), (rows[3], rows[4])), strict=True):
        right = normed * of_tokens(scale) + of_tokens(shift)
        assert ((y.double() - right).abs() <= right.abs() * 2**-8 * 1.01 + 1e-5).all()


def test_what_is_pending_gives_the_same_bits_added_alone_or_by_the_norm():
    results = []
    for alone in (True, False):
        stream, outs, rows = stream_of(4096, 100, "two", fused=True)
        for out in outs:
            stream.add(out, rows[0])
            if alone:
                stream.tokens()
        results.append([*stream.normed((rows[1], rows[2]), norm="layer"), stream.tokens()])
    assert all(map(torch.equal, *results))


def test_more_than_2_to_the_31_values():
    tokens, width = 2**19 + 8, 4096
    x = torch.zeros(1, tokens, width, dtype=torch.bfloat16, device="cuda")
    out, row = torch.zeros_like(x), torch.ones(1, width, dtype=torch.bfloat16, device="cuda")
    out[:, -1] = 3
    stream = ResidualStream(x, None, 1e-6, fused=True)
    stream.add(out, 2 * row)
    (normed,) = stream.normed((row, 0 * row))
    assert (x[:, -1] == 6).all() and (normed[:, -1] == 1).all()
    assert not x[:, :-1].any() and not normed[:, :-1].any()


def test_fused_or_not_is_part_of_the_graph_key(transformer):
    _, constants, modulation = prepared(transformer)
    keys = [
        GraphKey.of((dataclasses.replace(constants, fused=fused), modulation), weight_generation=1)
        for fused in (True, False)
    ]
    assert keys[0].differences(keys[1]) == ["0.fused: False -> True"]
