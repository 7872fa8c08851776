"""The background sampler on a device of our own; the binding to NVML itself: tests/gpu/test_phase_log.py."""

import threading
import time

import pytest
import torch

from ltx_runtime.nvml import NVMLDevice, NVMLError, UtilizationSampler

CUDA = torch.device("cuda", 0)


class Readings:
    """Gives the readings one by one, then repeats the last; an exception among them is raised."""

    def __init__(self, *readings):
        self.readings = list(readings)
        self.closed = False
        self.all_read = threading.Event()

    def __call__(self, device):
        return self

    def utilization(self):
        reading = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        if len(self.readings) == 1:
            self.all_read.set()
        if isinstance(reading, Exception):
            raise reading
        return reading

    def close(self):
        self.closed = True


def test_a_window_counts_its_own_samples_only():
    device = Readings((100, 40), (0, 0), (50, 20), (0, 0), (90, 1))
    sampler = UtilizationSampler(CUDA, device)
    sampler.start()
    assert device.all_read.wait(5)
    sampler.stop()
    times = [at for at, _, _ in sampler.samples]
    assert times == sorted(times) and device.closed
    assert [(gpu, memory) for _, gpu, memory in sampler.samples[:4]] == [(100, 40), (0, 0), (50, 20), (0, 0)]
    assert sampler.window(times[0], times[3]) == {"util_mean": 0.375, "util_zero_share": 0.5, "samples": 4}
    assert sampler.window(times[1], times[1]) == {"util_mean": 0.0, "util_zero_share": 1.0, "samples": 1}
    assert sampler.window(times[-1] + 1, times[-1] + 2) is None  # nobody was sampling any more


def test_a_window_between_two_samples_has_none():
    device = Readings((10, 0), (10, 0))
    sampler = UtilizationSampler(CUDA, device)
    sampler.start()
    assert device.all_read.wait(5)
    before_all = sampler.samples[0][0] - 1
    assert sampler.window(before_all - 1, before_all) == {"util_mean": None, "util_zero_share": None, "samples": 0}
    sampler.stop()


def test_sampling_can_pause_and_go_on():
    device = Readings((10, 0))
    sampler = UtilizationSampler(CUDA, device)
    for expected in (1, 2):
        sampler.start()
        deadline = time.monotonic() + 5
        while len(sampler.samples) < expected and time.monotonic() < deadline:
            time.sleep(0.001)
        sampler.stop()
    count = len(sampler.samples)
    assert count >= 2
    time.sleep(0.05)
    assert len(sampler.samples) == count


def test_a_device_that_fails_half_way_gives_its_reason_and_keeps_its_samples():
    device = Readings((10, 0), NVMLError("GPU is lost"))
    sampler = UtilizationSampler(CUDA, device)
    sampler.start()
    sampler.stop()  # joins: the thread reads at least once before it looks at the flag
    sampler.start()
    sampler.stop()
    assert len(sampler.samples) == 1 and device.closed
    assert sampler.reason == "GPU is lost"


def test_without_nvml_there_is_a_reason_and_no_error(caplog):
    def absent(device):
        raise NVMLError("libnvidia-ml.so.1 can't be loaded")

    caplog.set_level("INFO", logger="ltxgraph")
    sampler = UtilizationSampler(CUDA, absent)
    for _ in range(3):
        sampler.start()
        sampler.stop()
    assert sampler.reason == "libnvidia-ml.so.1 can't be loaded"
    assert sampler.window(0, time.perf_counter_ns()) is None
    assert len([r for r in caplog.records if "NVML" in r.message]) == 1


def test_a_cpu_render_starts_no_thread():
    sampler = UtilizationSampler(torch.device("cpu"))
    before = threading.active_count()
    sampler.start()
    assert threading.active_count() == before and sampler.reason == "no CUDA device"
    sampler.stop()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_the_binding_says_what_is_missing():
    with pytest.raises(NVMLError, match="not built for NVIDIA"):
        NVMLDevice(CUDA)
