"""Neighbourhood attention against its definition, query by query in float64."""

from __future__ import annotations

import pytest
import torch

from ltx_runtime.errors import ShapeError
from ltx_runtime.video_vae.neighbourhood_attention import attention_backend, neighbourhood_attention

# (T, H, W), window: odd and even windows, borders only, the window as large as the grid, more than a tile of queries.
CASES = [
    ((5, 6, 9), (3, 5, 3)),
    ((6, 9, 18), (2, 4, 5)),
    ((4, 5, 6), (4, 5, 6)),
    ((1, 7, 7), (1, 7, 7)),
    ((9, 3, 3), (1, 1, 1)),
]


def random_qkv(grid, heads, head_dim, dtype, *, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, *grid, heads, head_dim, generator=generator).to(dtype) for _ in range(3)]


def definition(q, k, v, kernel_size):
    """video_vae.md section 6.3, word by word."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty_like(q)
    for index in torch.cartesian_prod(*(torch.arange(cells) for cells in q.shape[1:4])).tolist():
        starts = [
            min(max(i - kernel // 2, 0), cells - kernel) for i, cells, kernel in zip(index, q.shape[1:4], kernel_size)
        ]
        window = (slice(None), *(slice(start, start + kernel) for start, kernel in zip(starts, kernel_size)))
        keys, values = k[window].flatten(1, 3), v[window].flatten(1, 3)
        place = (slice(None), *index)
        weights = torch.einsum("bnd,bknd->bnk", q[place], keys).softmax(-1)
        out[place] = torch.einsum("bnk,bknd->bnd", weights, values)
    return out


@pytest.mark.parametrize("grid, window", CASES)
def test_every_query_sees_exactly_its_window(grid, window):
    q, k, v = random_qkv(grid, 2, 16, torch.float32, batch=2)
    out = neighbourhood_attention(q, k, v, window)
    assert (out.dtype, out.shape) == (q.dtype, q.shape)
    assert (out - definition(q, k, v, window)).abs().max() < 1e-5


def test_low_precision_rounds_inputs_and_result_only():
    q, k, v = random_qkv((5, 6, 9), 1, 32, torch.bfloat16)
    exact = definition(q, k, v, (3, 3, 5))
    error = (neighbourhood_attention(q, k, v, (3, 3, 5)).double() - exact).abs().max()
    assert error < 2 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_the_result_may_take_the_place_of_the_queries():
    q, k, v = random_qkv((9, 9, 17), 2, 16, torch.float32)  # more than one tile on every axis
    expected = neighbourhood_attention(q, k, v, (3, 3, 5))
    assert neighbourhood_attention(q, k, v, (3, 3, 5), out=q) is q
    assert torch.equal(q, expected)


def test_some_heads_of_a_tensor():
    q, k, v = random_qkv((4, 5, 6), 4, 16, torch.float32)
    expected = neighbourhood_attention(q, k, v, (3, 3, 3))
    out = torch.zeros_like(q)
    for heads in (slice(0, 1), slice(1, 4)):
        some = (..., heads, slice(None))
        neighbourhood_attention(q[some], k[some].contiguous(), v[some].contiguous(), (3, 3, 3), out=out[some])
    assert torch.allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("window", [(6, 3, 3), (0, 3, 3), (3, 3)])
def test_a_window_that_does_not_fit_is_refused(window):
    q, k, v = random_qkv((5, 5, 5), 1, 16, torch.float32)
    with pytest.raises(ShapeError, match=r"does not fit into \(5, 5, 5\)"):
        neighbourhood_attention(q, k, v, window)


def test_tensors_that_do_not_belong_together_are_refused():
    q, k, v = random_qkv((5, 5, 5), 1, 16, torch.float32)
    with pytest.raises(ShapeError, match=r"keys: .*expected as the queries"):
        neighbourhood_attention(q, k[:, 1:], v, (3, 3, 3))
    with pytest.raises(ShapeError, match=r"values: .*float64"):
        neighbourhood_attention(q, k, v.double(), (3, 3, 3))
    with pytest.raises(ShapeError, match="out: strides"):
        neighbourhood_attention(q, k, v, (3, 3, 3), out=torch.empty_like(q).transpose(1, 2))
    with pytest.raises(ShapeError, match="expected \\(B, T, H, W, heads, head_dim\\)"):
        neighbourhood_attention(q[0], k[0], v[0], (3, 3, 3))


def test_the_backend_says_what_it_lacks():
    name, why = attention_backend(torch.device("cpu"), torch.bfloat16, 64)
    assert name == "torch" and "Triton: no kernel for cpu" in why and "comfy-kitchen:" in why
