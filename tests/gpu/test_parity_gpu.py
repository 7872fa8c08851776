"""Parity on the device: findings as on the CPU, little memory beside the clips, and digests that never wait."""

import pytest
import torch

from ltx_runtime.parity import compare_frames, digest, frame_range, start_digest

MIB = 2**20


@pytest.fixture
def clips(device):
    """Two float32 clips of 142 MB that differ in three places."""
    a = torch.rand(61, 512, 384, 3, device=device, generator=torch.Generator(device).manual_seed(0)) * 0.9 + 0.05
    b = a.clone()
    b[7, 3, 2, 1] += 1e-6
    b[40, 500, 300, 2] += 0.25
    b[60, 511, 383, 0] = float("nan")
    return a, b


def test_the_device_and_the_cpu_find_the_same(clips):
    a, b = clips
    assert compare_frames(a, b) == compare_frames(a.cpu(), b.cpu())
    assert compare_frames(a, a.cpu()).bit_exact
    assert frame_range(a) == frame_range(a.cpu())
    assert digest(a) == digest(a.cpu()) and digest(b) == digest(b.cpu())


def test_a_digest_neither_waits_nor_moves_the_tensor(clips, device):
    a, _ = clips
    start_digest(a[:1])
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = start_digest(a)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated(device) - before < 40 * MIB
    assert pending.read() == digest(a.cpu())


def test_a_comparison_needs_little_memory(clips, device):
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    compare_frames(*clips)
    frame_range(clips[0])
    assert torch.cuda.max_memory_allocated(device) - before < 40 * MIB
