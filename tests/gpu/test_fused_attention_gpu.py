"""Attention and feed-forward on their fused kernels: as exact as the plain ones, and a capture gives eager's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltx_runtime.transformer import attention as attention_module
from ltx_runtime.transformer.attention import Attention, attend
from ltx_runtime.transformer.attention_kernels import gate_heads_, norm_and_rotate_
from ltx_runtime.transformer.feed_forward import FeedForward
from ltx_runtime.transformer.inputs import GuideBias
from ltx_runtime.transformer.rope import RopeTable, apply_rope

SITES = {
    # query width, context width (None: self attention), heads, head_dim, batch, tokens of x, of the context, roped
    "video self": (4096, None, 32, 128, 1, 1536, None, True),
    "audio self": (2048, None, 32, 64, 2, 126, None, True),
    "video text": (4096, 4096, 32, 128, 1, 1536, 1024, False),
    "audio text": (2048, 2048, 32, 64, 2, 126, 1024, False),
    "a2v": (4096, 2048, 32, 64, 1, 1536, 126, True),
    "v2a": (2048, 4096, 32, 64, 1, 126, 1536, True),
    "odd": (96, 80, 3, 24, 3, 37, 11, True),
}


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def random(*shape: int, seed: int = 0, dtype=torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def random_table(samples: int, tokens: int, heads: int, half: int) -> RopeTable:
    angles = 100 * random(samples, tokens, heads, half, seed=3, dtype=torch.float32)
    return RopeTable(angles.cos().bfloat16(), angles.sin().bfloat16())


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in module.to("cuda", torch.bfloat16).requires_grad_(False).parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
        else:
            parameter.uniform_(0.5, 1.5)
    return module


def site(name: str) -> tuple[Attention, dict]:
    """An Attention of the published sizes and its inputs."""
    width, context_width, heads, head_dim, batch, tokens, context_tokens, roped = SITES[name]
    attention = randomised(Attention(width, context_width or width, heads, head_dim, gated=True, eps=1e-6))
    inputs = {"x": random(batch, tokens, width), "context": None}
    if context_width is not None:
        inputs["context"] = random(batch, context_tokens, context_width, seed=1)
    if roped:
        inputs["rope"] = random_table(1, tokens, heads, head_dim // 2)
        if context_width is not None:
            inputs["context_rope"] = random_table(batch, context_tokens, heads, head_dim // 2)
    return attention, inputs


def in_float32(value):
    if isinstance(value, RopeTable):
        return RopeTable(value.cos.float(), value.sin.float())
    return value.float() if isinstance(value, Tensor) else value


def relative_rms(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact.double()).square().mean() / exact.double().square().mean()).sqrt().item()


def assert_as_exact(run: Callable[[bool], Tensor], exact: Tensor) -> None:
    fused, plain = (relative_rms(run(fused), exact) for fused in (True, False))
    assert 0 < fused <= 1.05 * plain < 0.1, (fused, plain)


@pytest.mark.parametrize("name", SITES)
def test_attention_is_as_exact_as_the_plain_one(name):
    attention, inputs = site(name)
    wide = copy.deepcopy(attention).float()
    exact = wide(**{key: in_float32(value) for key, value in inputs.items()})
    assert_as_exact(lambda fused: attention(**inputs, fused=fused), exact)


@pytest.mark.parametrize("width, bias, tokens", [(4096, False, 1536), (2048, True, 126), (96, False, 37)])
def test_feed_forward_is_as_exact_as_the_plain_one(width, bias, tokens):
    feed_forward, x = randomised(FeedForward(width, bias)), random(2, tokens, width)
    exact = copy.deepcopy(feed_forward).float()(x.float())
    assert_as_exact(lambda fused: feed_forward(x, fused=fused), exact)


@pytest.mark.parametrize("name", SITES)
def test_a_capture_gives_the_bits_of_eager(name, device):
    """What is made inside the capture (x, all projections) goes through every kernel."""
    attention, inputs = site(name)
    feed_forward = randomised(FeedForward(inputs["x"].shape[2], bias=False))
    source = inputs.pop("x")

    def run() -> Tensor:
        return feed_forward(attention(source * 0.5, **inputs, fused=True), fused=True)

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # the warm-up: cuBLAS's workspace, Triton's compiler
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = run()
    for seed in (5, 6):
        source.copy_(random(*source.shape, seed=seed))
        graph.replay()
        found = out.clone()
        torch.cuda.synchronize()
        assert torch.equal(found, run())
    del out
    graph.reset()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens, keys", [(126, 126), (126, 6144), (6144, 126), (1536, 1536), (1536, 1024)])
def test_what_attention_gives_needs_no_copy_to_be_flat(tokens, keys, head_dim):
    q, k, v = (random(1, count, 32, head_dim, seed=seed) for seed, count in enumerate((tokens, keys, keys)))
    assert attend(q, k, v).is_contiguous()
    if tokens == keys:
        assert attend(q, k, v, random(1, 1, tokens, keys)).is_contiguous()
        assert attend(q, k, v, GuideBias(random(1, 1, 1, keys), random(1, 1, 6, keys))).is_contiguous()


@pytest.mark.parametrize(
    "queries, keys, heads, flash",
    [
        (126, 1536, 32, True),
        (126, 6144, 32, True),
        (126, 24576, 32, True),
        (126, 126, 32, False),
        (6144, 126, 32, False),
    ],
)
def test_few_queries_on_many_keys_go_to_flash_and_agree(monkeypatch, queries, keys, heads, flash):
    q, k, v = (random(1, count, heads, 64, seed=seed) for seed, count in enumerate((queries, keys, keys)))
    asked = []
    original = torch._scaled_dot_product_flash_attention
    monkeypatch.setattr(
        torch, "_scaled_dot_product_flash_attention", lambda *args: asked.append(1) or original(*args)
    )
    found = attend(q, k, v)
    assert bool(asked) is flash
    assert torch.equal(found, attend(q, k, v)), "not the same bits every time"
    monkeypatch.setattr(attention_module, "_flash_is_faster", lambda *_: False)
    exact = F.scaled_dot_product_attention(*(x.transpose(1, 2).float() for x in (q, k, v))).transpose(1, 2)
    assert relative_rms(found, exact) <= 1.05 * relative_rms(attend(q, k, v), exact)


def test_more_than_2_to_the_31_values(device):
    tokens, heads, half = 2**19 + 8, 32, 64
    q = torch.zeros(1, tokens, heads * 2 * half, dtype=torch.bfloat16, device=device)
    k, weight = random(1, 1, heads * 2 * half), random(heads * 2 * half, seed=2)
    q[:, -1] = k[:, 0]
    table = RopeTable(*(torch.zeros(1, tokens, heads, half, dtype=torch.bfloat16, device=device) for _ in range(2)))
    own = random_table(1, 1, heads, half)
    table.cos[:, -1], table.sin[:, -1] = own.cos[:, 0], own.sin[:, 0]
    norm_and_rotate_(q, k, weight, weight, table, own, 2 * half, eps=1e-6)
    assert torch.equal(q[:, -1], k[:, 0]) and k.any() and not q[:, :-1].any()
    logits = torch.zeros(1, tokens, heads, dtype=torch.bfloat16, device=device)
    logits[:, -1] = 30
    gate_heads_(q.view(1, tokens, heads, 2 * half), logits)
    assert torch.equal(q[:, -1], 2 * k[:, 0])


def test_one_pass_rounds_once(device):
    """Where the plain path rounds after the norm, after each product and at the end."""
    heads, half = 32, 64
    q, k = (random(2, 40, heads * 2 * half, seed=seed) for seed in range(2))
    weights = [random(heads * 2 * half, seed=seed) for seed in (2, 3)]
    table = random_table(1, 40, heads, half)
    expected = []
    for x, weight in zip((q, k), weights):
        normed = F.rms_norm(x.double(), x.shape[2:], weight.double(), 1e-6).unflatten(2, (heads, 2 * half))
        expected.append(apply_rope(normed, RopeTable(table.cos.double(), table.sin.double())).flatten(2))
    norm_and_rotate_(q, k, *weights, table, table, 2 * half, eps=1e-6)
    for found, right in zip((q, k), expected):
        worst = ((found.double() - right).abs() - right.abs() * 2**-8 * 1.01).max().item()
        assert worst < 1e-5
