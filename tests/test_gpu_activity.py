"""What is made of profiler records, on records written by hand; the records themselves: tests/gpu/test_phase_log.py."""

import json

import pytest
import torch

from ltx_runtime.gpu_activity import ActivityRecord, Memcpy, _read_records, measure_gpu_busy, summarize_activity

MS = 1_000_000


def record(kind, name, start_ms, end_ms, size_bytes=None):
    return ActivityRecord(kind, name, int(start_ms * MS), int(end_ms * MS), size_bytes)


def host(name, at_ms):
    return record("host", name, at_ms, at_ms + 0.01)


RECORDS = [
    host("cudaMemGetInfo", 0),
    host("cudaLaunchKernel", 1),
    host("cudaLaunchKernelExC", 2),
    host("cudaMemcpyAsync", 3),
    host("cudaStreamSynchronize", 4),
    host("cudaStreamSynchronize", 5),
    host("cudaMemGetInfo", 6),
    host("cudaDeviceSynchronize", 7),
    host("cudaDeviceSynchronize", 8),
    record("kernel", "gemm", 10, 14),
    record("kernel", "gemm", 12, 16),
    record("kernel", "gelu", 20, 21),
    record("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 15, 18, 4096),
    record("gpu_memset", "Memset (Device)", 21, 22),
]


def test_busy_time_is_a_union_and_gaps_lie_inside():
    activity = summarize_activity(RECORDS, "result", 30.0)
    assert activity.gpu_ms == pytest.approx(8 + 2)  # 10..18 and 20..22
    assert activity.kernel_ms == pytest.approx(6 + 1)  # 10..16 and 20..21
    assert activity.longest_gap_ms == pytest.approx(2)
    assert (activity.kernel_count, activity.memset_count, activity.launches) == (3, 1, 2)
    assert [(k.name, k.count, k.ms) for k in activity.top_kernels] == [("gemm", 2, 8.0), ("gelu", 1, 1.0)]
    assert activity.memcpys == (Memcpy("HtoD", "Pageable -> Device", 4096, 3.0),)
    assert activity.result == "result" and activity.profiled_wall_ms == 30.0 and activity.reason is None


def test_waits_are_counted_between_the_markers_only():
    """The profiler and the measurement wait for the device themselves."""
    assert summarize_activity(RECORDS, None, 1.0).host_waits == (("cudaStreamSynchronize", 2),)


def test_without_visible_markers_waits_are_unknown_not_zero():
    visible = [r for r in RECORDS if r.name != "cudaMemGetInfo"]
    activity = summarize_activity(visible, None, 1.0)
    assert activity.host_waits is None and activity.launches is None
    assert activity.attrs()["host_waits"] is None


def test_no_wait_at_all_is_an_empty_list():
    records = [r for r in RECORDS if r.name != "cudaStreamSynchronize"]
    assert summarize_activity(records, None, 1.0).host_waits == ()


def test_records_without_device_work_are_no_measurement_of_zero():
    activity = summarize_activity([host("cudaMemGetInfo", 0), host("cudaMemGetInfo", 1)], None, 1.0)
    assert activity.gpu_ms is None and "no GPU activity" in activity.reason


def test_attrs_are_plain_values():
    to_host = record("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 30, 31, 8)
    more = [to_host, record("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 32, 33, 4)]
    attrs = summarize_activity(RECORDS + more, torch.ones(3), 30.0).attrs()
    assert json.loads(json.dumps(attrs)) == attrs and "result" not in attrs
    assert attrs["memcpys"] == {
        "HtoD (Pageable -> Device)": {"count": 2, "bytes": 4100},
        "DtoH (Device -> Pinned)": {"count": 1, "bytes": 8},
    }
    assert attrs["host_waits"] == {"cudaStreamSynchronize": 2}
    sizeless = record("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 32, 33)
    unknown = summarize_activity([*RECORDS, sizeless], None, 1.0).attrs()
    assert unknown["memcpys"]["HtoD (Pageable -> Device)"] == {"count": 2, "bytes": None}


def test_without_cuda_fn_still_runs_once():
    calls = []
    activity = measure_gpu_busy(lambda: calls.append(1) or "result", device="cpu")
    assert calls == [1] and activity.result == "result"
    assert activity.gpu_ms is None and activity.reason == "no CUDA device" and activity.host_waits is None


def test_an_exception_of_fn_passes_through():
    with pytest.raises(KeyError):
        measure_gpu_busy(lambda: {}["x"], device="cpu")


def test_host_events_of_the_real_profiler_are_read():
    """CPU operators stand for runtime calls: both are host events, so their reading is tested without a GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(8) + 1
    records = _read_records(profiler, 0)
    assert "aten::add" in {r.name for r in records}
    assert all(r.kind == "host" and r.end_ns >= r.start_ns > 0 for r in records)
