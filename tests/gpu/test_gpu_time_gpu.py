"""GPU time by events against CUPTI, on work of known size; a render's is checked in benchmarks/step.py.

Run it alone on the card: between events lie the time slices of other processes too, CUPTI leaves them out.
"""
import pytest
import torch
from torch import nn

from ltx_runtime.gpu_activity import measure_gpu_busy
from ltx_runtime.gpu_time import SHORTEST_KERNEL_MS, LaunchCount, launch_gap_ms, queue_pace_ms, queued_gpu_time


class Block(nn.Module):
    """Small kernels and large ones, as a transformer block has them."""

    def __init__(self, width: int, launches: int):
        super().__init__()
        self.weight = torch.randn(width, width, device="cuda", dtype=torch.bfloat16) / width**0.5
        self.launches = launches

    def forward(self, x):
        for _ in range(self.launches // 3):
            x = torch.nn.functional.rms_norm(x @ self.weight + 1, x.shape[-1:])
        return x


@pytest.fixture(autouse=True)
def alone(device):
    """Where NVML tells, nobody else computes on the card."""
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    if len(processes) > 1:
        pytest.skip(f"{len(processes)} processes compute on this card")


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        torch.cuda._sleep(400_000_000)  # an idle card needs some 100 ms to reach its clock
        yield


def work(width: int, tokens: int, blocks: int = 8, launches: int = 300):
    modules = [Block(width, launches) for _ in range(blocks)]
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)

    def fn():
        y = x
        for module in modules:
            y = module(y)
        return y

    return fn, modules


@pytest.mark.parametrize(
    ("width", "tokens", "host_ahead", "bound"),
    # 512: kernels of 2 us, twice the gap between them.
    [(512, 1024, False, 0.1), (1024, 4096, False, 0.05), (2048, 8192, False, 0.05), (2048, 8192, True, 0.05)],
)
def test_the_union_of_cuptis_kernels(device, width, tokens, host_ahead, bound):
    fn, cuts = work(width, tokens)
    fn()
    with LaunchCount() as count:
        expected = fn()
    found = queued_gpu_time(
        fn, cuts, part_ms=300 * 0.06, launches=count.launches, host_ahead=host_ahead, device=device
    )
    assert found.reason is None and torch.equal(found.result, expected)
    activity = measure_gpu_busy(fn, device=device)
    print(f"{width}: {found.method} {found.gpu_ms:.2f} ms, with gaps {found.event_ms:.2f}, CUPTI {activity.gpu_ms:.2f}")
    assert activity.kernel_count == pytest.approx(count.launches, rel=0.05)
    assert found.gpu_ms == pytest.approx(activity.gpu_ms, rel=bound)


def test_the_gap_of_a_full_queue(device):
    pace = queue_pace_ms(device)
    activity = measure_gpu_busy(lambda: [torch.cuda._sleep(1) for _ in range(300)], device=device)
    kernel = activity.kernel_ms / activity.kernel_count
    print(f"pace {pace * 1e3:.2f} us, kernel {kernel * 1e3:.2f} us, gap {launch_gap_ms(device) * 1e3:.2f} us")
    assert pace > kernel
    assert kernel == pytest.approx(SHORTEST_KERNEL_MS, abs=0.3e-3)
    assert 0 < launch_gap_ms(device) < 4e-3
