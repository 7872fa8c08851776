"""Phase log on a real GPU: stream time, busy time, memory peaks, CUPTI records, NVML. Run under both allocators:

python3 -m pytest tests/gpu
PYTORCH_ALLOC_CONF=backend:cudaMallocAsync python3 -m pytest tests/gpu
"""

import os
import subprocess
import sys
import time

import pytest
import torch

from ltx_runtime.gpu_activity import measure_gpu_busy
from ltx_runtime.nvml import NVMLDevice, UtilizationSampler
from ltx_runtime.timing import Timeline

MIB = 2**20


@pytest.fixture
def spin(device):
    """spin(ms): a kernel that keeps the GPU busy for about so long."""
    torch.cuda._sleep(400_000_000)  # an idle card needs some 100 ms to reach its clock, which is what _sleep counts
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    end.synchronize()
    cycles_per_ms = 50_000_000 / start.elapsed_time(end)
    return lambda ms: torch.cuda._sleep(int(ms * cycles_per_ms))


def end_of(timeline: Timeline, phase: str) -> dict:
    return next(event for event in timeline.events if event["event"] == "end" and event["phase"] == phase)


def test_a_phase_waits_for_its_work_and_stream_time_is_that_of_the_gpu(device, spin):
    timeline = Timeline(None, device=device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with timeline.phase("sample.step") as phase:
        first.record()
        spin(40)
        last.record()
    assert last.query(), "the phase ended before its work"
    work_ms = first.elapsed_time(last)
    assert work_ms <= phase.wall_ms
    assert end_of(timeline, "sample.step")["stream_ms"] == pytest.approx(work_ms, rel=0.02)


def test_stream_time_contains_the_gaps_that_busy_time_leaves_out(device, spin):
    def two_kernels_apart():
        spin(10)
        torch.cuda.synchronize()
        time.sleep(0.05)
        spin(10)

    timeline = Timeline(None, device=device)
    with timeline.phase("sample.measure") as phase:
        activity = measure_gpu_busy(two_kernels_apart, device=device)
        phase.gpu_ms, phase.gpu_method = activity.gpu_ms, "cupti"
    assert activity.reason is None
    end = end_of(timeline, "sample.measure")
    assert end["gpu_ms"] == pytest.approx(20, rel=0.3)
    assert end["stream_ms"] > 65
    assert activity.longest_gap_ms >= 50
    assert 60 < activity.profiled_wall_ms < end["wall_ms"]


def test_cupti_agrees_with_an_event_pair_around_gapless_work(device):
    x = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)

    def work():
        for _ in range(200):
            torch.mm(x, x)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    activity = measure_gpu_busy(graph.replay, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    assert activity.kernel_count >= 200, "kernels inside a replay are seen one by one"
    assert activity.gpu_ms == pytest.approx(start.elapsed_time(end), rel=0.1)


def test_issuing_never_waits_and_steps_in_flight_add_up(device, spin):
    timeline = Timeline(None, device=device)
    started = time.perf_counter()
    in_flight = None
    for step in range(4):
        phase = timeline.begin("sample.step", step=step)
        before = time.perf_counter()
        spin(60)
        phase.issued()
        assert time.perf_counter() - before < 0.03
        if in_flight is not None:
            in_flight.wait()
            timeline.end(in_flight)
        in_flight = phase
    timeline.end(in_flight)
    elapsed_ms = (time.perf_counter() - started) * 1e3
    ends = [event for event in timeline.events if event["event"] == "end"]
    for event in ends:
        assert event["stream_ms"] == pytest.approx(60, rel=0.2)
    assert sum(event["wall_ms"] for event in ends) == pytest.approx(elapsed_ms, rel=0.05)


def test_an_inner_phase_has_its_own_peak_and_the_outer_keeps_the_largest(device):
    timeline = Timeline(None, device=device)
    base = torch.cuda.memory_allocated(device)
    with timeline.phase("sample.step") as outer:
        large = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
        del large
        with timeline.phase("sample.measure") as inner:
            small = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
            del small
    with timeline.phase("upscale") as later:
        pass
    assert 64 * MIB <= inner.mem_peak_bytes - base < 100 * MIB
    assert 256 * MIB <= outer.mem_peak_bytes - base < 300 * MIB
    assert later.mem_peak_bytes - base < 32 * MIB
    assert timeline.summary()["mem_peak_bytes"] == outer.mem_peak_bytes


def test_a_phase_in_a_capture_is_refused_before_it_harms_the_capture(device):
    timeline = Timeline(None, device=device)
    x = torch.zeros(8, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        timeline.note("sample.capture", "a note is host work")
        with pytest.raises(RuntimeError, match="while the current stream is capturing"):
            timeline.begin("sample.step")
    graph.replay()
    assert x.tolist() == [1.0] * 8
    with timeline.phase("sample.step"):
        graph.replay()
    assert timeline.child().summary()["phases"]["sample.step"]["count"] == 1


def test_a_phase_that_fails_waits_for_nothing(device, spin):
    timeline = Timeline(None, device=device)
    started = time.perf_counter()
    with pytest.raises(ValueError, match="mine"), timeline.phase("sample.step"):
        spin(300)
        raise ValueError("mine")
    assert time.perf_counter() - started < 0.2
    torch.cuda.synchronize()
    event = end_of(timeline, "sample.step")
    assert event["attrs"]["error"] == "ValueError" and event["stream_ms"] is None


def test_logging_is_no_hidden_synchronisation(device, spin):
    timeline = Timeline(None, device=device)

    def logged_work():
        phase = timeline.begin("sample.step")
        spin(20)
        phase.issued()
        timeline.note("sample.step", "issued")
        return phase

    activity = measure_gpu_busy(logged_work, device=device)
    timeline.end(activity.result)
    assert activity.host_waits == () and activity.memcpys == ()


# what the profiler shows


def test_kernels_copies_and_waits_are_counted(device):
    x = torch.randn(1024, device=device)
    host = torch.randn(1024)
    pinned = torch.empty(1024, pin_memory=True)

    def work():
        y = (x + 1) * 2
        y.copy_(host)
        pinned.copy_(y, non_blocking=True)
        return y.sum().item()

    work()
    activity = measure_gpu_busy(work, device=device)
    assert activity.reason is None
    assert activity.kernel_count == 3, activity.top_kernels
    assert sorted(copy.kind for copy in activity.memcpys) == ["DtoH", "DtoH", "HtoD"]
    memories = {copy.memory for copy in activity.memcpys}
    assert {"Pageable -> Device", "Device -> Pinned"} <= memories  # .item() reads through either, by torch version
    sizes = sorted(copy.bytes for copy in activity.memcpys if copy.bytes is not None)
    assert sizes in ([4, 4096, 4096], []), "bytes: all known, or none on a torch without activity metadata"
    waits = dict(activity.host_waits)
    assert waits.get("cudaStreamSynchronize", 0) >= 1 and "cudaDeviceSynchronize" not in waits
    assert activity.launches >= 3
    assert 0 < activity.kernel_ms <= activity.gpu_ms <= activity.profiled_wall_ms


def test_pure_device_work_shows_no_copy_and_no_wait(device):
    x = torch.randn(256, 256, device=device)
    (x @ x).relu()
    activity = measure_gpu_busy(lambda: torch.relu(x @ x), device=device)
    assert activity.memcpys == () and activity.host_waits == ()


def test_a_wait_of_fn_at_its_very_end_is_counted_and_ours_is_not(device):
    x = torch.ones(8, device=device)

    def work():
        x.add_(1)
        torch.cuda.synchronize()

    assert dict(measure_gpu_busy(work, device=device).host_waits) == {"cudaDeviceSynchronize": 1}
    assert measure_gpu_busy(lambda: x.add_(1), device=device).host_waits == ()


def test_beside_another_profiler_fn_runs_unmeasured(device):
    x = torch.zeros(8, device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        activity = measure_gpu_busy(lambda: x.add_(1), device=device)
    assert activity.gpu_ms is None and "another profiler" in activity.reason
    assert x.tolist() == [1.0] * 8


def test_an_exception_of_fn_leaves_the_profiler_usable(device):
    x = torch.zeros(8, device=device)

    def broken():
        raise ValueError("of fn")

    with pytest.raises(ValueError, match="of fn"):
        measure_gpu_busy(broken, device=device)
    assert measure_gpu_busy(lambda: x.add_(1), device=device).kernel_count == 1


def test_measuring_leaves_later_steps_as_fast_as_before(device):
    """CUPTI must not stay attached at a price: the step after a measured one is timed by the graph policy."""
    x = torch.zeros(8, device=device)

    def launches_ms():
        best = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(2000):
                x.add_(1)
            torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) * 1e3)
        return best

    before = launches_ms()
    measure_gpu_busy(lambda: x.add_(1), device=device)
    after = launches_ms()
    print(f"2000 launches: {before:.2f} ms before, {after:.2f} ms after a profiled call")
    assert after < before * 1.3


# NVML


def nvml_device(device) -> NVMLDevice:
    if torch.version.cuda is None:
        pytest.skip("not an NVIDIA GPU")
    return NVMLDevice(device)


def test_the_handle_is_that_of_the_torch_device(device):
    handle = nvml_device(device)
    assert handle.uuid() == f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    gpu, memory = handle.utilization()
    assert 0 <= gpu <= 100 and 0 <= memory <= 100
    handle.close()


def test_the_handle_follows_cuda_visible_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    wanted = nvml_device(torch.device("cuda", 1)).uuid()
    program = "import torch; from ltx_runtime.nvml import NVMLDevice; print(NVMLDevice(torch.device('cuda', 0)).uuid())"
    seen = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    assert seen == wanted


def test_a_busy_segment_shows_in_nvml_and_a_capture_beside_it_survives(device, spin):
    nvml_device(device).close()
    timeline = Timeline(None, device=device)
    x = torch.zeros(1024, device=device)
    with timeline.segment("Sampler"):
        with timeline.phase("sample.capture"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(2000):
                    x.add_(1)
        with timeline.phase("sample.replay"):
            for _ in range(30):
                spin(50)
            graph.replay()
    assert x[0].item() == 2000
    nvml = end_of(timeline, "sample.replay")["nvml"]
    assert nvml["samples"] >= 30 and nvml["util_mean"] > 0.3
    assert nvml["util_zero_share"] < 0.7


def test_the_sampler_stops(device):
    nvml_device(device).close()
    sampler = UtilizationSampler(device)
    sampler.start()
    time.sleep(0.3)
    sampler.stop()
    count = len(sampler.samples)
    time.sleep(0.1)
    assert count > 3 and len(sampler.samples) == count
