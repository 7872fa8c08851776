"""GPU utilisation from NVML, sampled in the background while a node works.

What the number means: NVML's `utilization.gpu` is the share of the driver's last sampling window (between 1/6 s and
1 s, by product) in which at least one kernel ran. Samples are taken faster than that so that a change is seen early,
but neighbouring samples share a window: a phase shorter than a second also shows what ran before it, and gaps of a few
ms between kernels do not show at all. It is a cross-check on long phases; `gpu_ms` of the phase log is the measurement.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

log = logging.getLogger("ltxgraph")

PERIOD_S = 0.02


class NVMLError(RuntimeError):
    """NVML is absent or refuses; the message says why."""


class NVMLDevice:
    """The NVML handle of one torch CUDA device, found by the UUID that the CUDA runtime reports for it, so that
    CUDA_VISIBLE_DEVICES and a different device order can't lead to a neighbour's card.

    Raises NVMLError where the package, the library, the device or the counter is not there (no NVIDIA driver, ROCm, a
    MIG slice).
    """

    def __init__(self, device: torch.device):
        if torch.version.cuda is None:
            raise NVMLError("this torch is not built for NVIDIA GPUs")
        try:
            import pynvml
        except ImportError as error:
            raise NVMLError(f"pynvml can't be imported ({error}); pip install nvidia-ml-py") from error
        self._nvml = pynvml
        self._call(pynvml.nvmlInit)
        try:
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = self._call(pynvml.nvmlDeviceGetHandleByUUID, uuid)
            self.utilization()
        except NVMLError:
            self.close()
            raise

    def utilization(self) -> tuple[int, int]:
        """(gpu, memory) in percent: time with a kernel running, time with device memory being read or written."""
        rates = self._call(self._nvml.nvmlDeviceGetUtilizationRates, self._handle)
        return rates.gpu, rates.memory

    def uuid(self) -> str:
        return self._call(self._nvml.nvmlDeviceGetUUID, self._handle)

    def close(self) -> None:
        self._call(self._nvml.nvmlShutdown)

    def _call(self, function: Callable, *args):
        try:
            return function(*args)
        except self._nvml.NVMLError as error:
            raise NVMLError(f"{function.__name__}: {error}") from error


class UtilizationSampler:
    """Samples one device's utilisation every PERIOD_S between `start` and `stop`, in a daemon thread.

    The thread only talks to NVML, which is safe beside a graph capture (cuda_graph_facts.md section 2). Without NVML
    there are no samples and `reason` says why; nothing is raised.
    open_device: makes the object whose `utilization()` is read and which is `close()`d in the end.
    """

    def __init__(self, device: torch.device, open_device: Callable[[torch.device], NVMLDevice] = NVMLDevice):
        self.reason: str | None = None if device.type == "cuda" else "no CUDA device"
        self._device = device
        self._open_device = open_device
        self._lock = threading.Lock()
        self._samples: list[tuple[int, int, int]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._reading = False

    @property
    def samples(self) -> list[tuple[int, int, int]]:
        """(time.perf_counter_ns, gpu percent, memory percent) of every sample so far."""
        with self._lock:
            return list(self._samples)

    def start(self) -> None:
        """Begin sampling. Opening NVML takes some ms, so the thread does it; a first failure is final."""
        if self.reason is not None or self._thread is not None:
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="ltxgraph-nvml", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None

    def window(self, start_ns: int, end_ns: int) -> dict | None:
        """Utilisation between two host times: util_mean (0..1), util_zero_share (share of samples at 0 %), samples.

        None where nothing was sampling. Means are None when no sample fell inside (a phase shorter than the period).
        """
        inside = []
        with self._lock:
            for at, gpu, _ in reversed(self._samples):
                if at < start_ns:
                    break
                if at <= end_ns:
                    inside.append(gpu)
            if not inside and not self._reading:
                return None
        if not inside:
            return {"util_mean": None, "util_zero_share": None, "samples": 0}
        return {
            "util_mean": round(sum(inside) / len(inside) / 100, 4),
            "util_zero_share": round(inside.count(0) / len(inside), 4),
            "samples": len(inside),
        }

    def _run(self) -> None:
        try:
            device = self._open_device(self._device)
        except NVMLError as error:
            self._give_up(error)
            return
        self._reading = True
        try:
            while not self._stop.is_set():
                gpu, memory = device.utilization()
                with self._lock:
                    self._samples.append((time.perf_counter_ns(), gpu, memory))
                self._stop.wait(PERIOD_S)
        except NVMLError as error:
            self._give_up(error)
        finally:
            self._reading = False
            device.close()

    def _give_up(self, error: NVMLError) -> None:
        self.reason = str(error)
        log.info("ltxgraph: NVML utilisation is not available (%s)", error)

