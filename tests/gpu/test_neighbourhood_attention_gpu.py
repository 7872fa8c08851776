"""The Triton kernel and comfy-kitchen's against the plain path in float32, and in a capture. Run under both allocators:

    python3 -m pytest tests/gpu/test_neighbourhood_attention.py
    PYTORCH_ALLOC_CONF=backend:cudaMallocAsync python3 -m pytest tests/gpu/test_neighbourhood_attention.py
"""
import pytest
import torch

from ltx_runtime import triton_use
from ltx_runtime.video_vae import neighbourhood_attention as module
from ltx_runtime.video_vae.neighbourhood_attention import neighbourhood_attention, plain_attention

CASES = [
    ((27, 19, 43), (11, 11, 11), 4, 64),
    ((11, 11, 11), (11, 11, 11), 2, 64),
    ((7, 13, 21), (3, 7, 7), 3, 64),
    ((9, 10, 11), (4, 5, 6), 2, 48),
    ((5, 17, 9), (3, 5, 5), 1, 16),
    ((1, 7, 7), (1, 7, 7), 2, 32),
]


def random_qkv(grid, heads, head_dim, dtype, device, batch=1):
    generator = torch.Generator(device).manual_seed(sum(grid))
    shape = (batch, *grid, heads, head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(3))
    return q.mul_(head_dim**-0.5), k, v


def exact(q, k, v, window):
    out = torch.empty_like(q, dtype=torch.float32)
    plain_attention(q.float(), k.float(), v.float(), window, out)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grid, window, heads, head_dim", CASES)
def test_triton_computes_the_definition(device, grid, window, heads, head_dim, dtype):
    q, k, v = random_qkv(grid, heads, head_dim, dtype, device, batch=2)
    expected = exact(q, k, v, window)
    out = neighbourhood_attention(q, k, v, window, out=torch.full_like(q, float("nan")))
    assert triton_use.triton_refusal(device, dtype, module.TRITON_OWNER) is None
    assert (out.float() - expected).abs().max() < 2e-2
    assert neighbourhood_attention(q, k, v, window, out=q) is q
    assert torch.equal(q, out)


def test_comfy_kitchen_computes_the_definition(device, monkeypatch):
    na3d = getattr(pytest.importorskip("comfy_kitchen"), "na3d", None)
    if na3d is None:
        pytest.skip("this comfy-kitchen has no na3d")
    monkeypatch.setitem(triton_use._failures, module.TRITON_OWNER, "switched off by a test")
    q, k, v = random_qkv((9, 17, 19), 2, 64, torch.bfloat16, device)
    assert module.attention_backend(device, q.dtype, 64)[0] == "comfy-kitchen"
    assert (neighbourhood_attention(q, k, v, (3, 7, 7)).float() - exact(q, k, v, (3, 7, 7))).abs().max() < 2e-2


def test_some_heads_of_a_tensor_of_more_than_2_to_the_31_elements(device):
    grid, window = (11, 1024, 768), (3, 3, 3)
    q = torch.zeros(1, *grid, 4, 64, dtype=torch.bfloat16, device=device)
    assert q.numel() > 2**31
    corner = (slice(None), slice(-4, None), slice(-16, None), slice(-16, None))
    some = (..., slice(2, 4), slice(None))
    q[corner].normal_()
    k, v = (torch.zeros(1, *grid, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    k[corner].normal_()
    v[corner].normal_()
    small = [x[corner].contiguous() for x in (q[some], k, v)]
    expected = exact(*small, window)
    neighbourhood_attention(q[some], k, v, window, out=q[some])
    # Away from the cut edges the corner sees nothing but itself.
    inner = (slice(None), slice(1, None), slice(1, None), slice(1, None))
    assert (q[some][corner][inner].float() - expected[inner]).abs().max() < 2e-2


def test_a_capture_replays_the_eager_bits(device):
    q, k, v = random_qkv((13, 14, 21), 2, 64, torch.bfloat16, device)
    out = torch.empty_like(q)
    expected = neighbourhood_attention(q, k, v, (5, 5, 5)).clone()
    stream = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        neighbourhood_attention(q, k, v, (5, 5, 5), out=out)
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        neighbourhood_attention(q, k, v, (5, 5, 5), out=out)
        graph.capture_end()
    out.zero_()
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_a_capture_makes_its_own_tensors(device):
    """As inside a recorded decode: queries, keys, values and result all come from the capture."""
    given = random_qkv((13, 14, 21), 2, 64, torch.bfloat16, device)
    expected = neighbourhood_attention(*given, (5, 5, 5)).clone()
    out = torch.zeros_like(expected)

    def attend():
        q, k, v = (x.clone() for x in given)
        out.copy_(neighbourhood_attention(q, k, v, (5, 5, 5)))

    stream = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        attend()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        attend()
        graph.capture_end()
    for x in given:
        x.copy_(x.flip(1))
    flipped = neighbourhood_attention(*given, (5, 5, 5))
    assert not torch.equal(flipped, expected)
    out.zero_()
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, flipped)
    assert triton_use.triton_refusal(device, torch.bfloat16, module.TRITON_OWNER) is None
