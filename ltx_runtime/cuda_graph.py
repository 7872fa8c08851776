"""CUDA-graph capture of one function from tensors to tensors.

Knows tensors, a function and a stream; policy (when to capture) and the denoising loop live elsewhere. What CUDA and
PyTorch's two allocators allow during and after a capture was measured; those facts shape `_guarded_capture`:

* Warm-up runs on the capture stream itself: cuBLAS keeps one workspace per (handle, stream), and a workspace made
  inside a capture belongs to the graph.
* A capture that Python leaves by an exception is either still valid (class A) or invalidated by CUDA (class B). They
  need opposite clean-ups; the wrong one breaks the allocator.
* Under cudaMallocAsync (ComfyUI's default) the process aborts when a tensor made inside a capture dies outside of it
  before the graph was replayed once, and PyTorch prints a warning when it dies later. So the results are copied into
  buffers that were there before, inside the capture, and everything made in it dies in it; what a failed capture leaves
  behind is replayed before it is dropped.
"""
from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import host_waits
from .errors import CaptureError, MemoryShortageError, RestartRequiredError
from .memory import is_out_of_memory
from .tensor_tree import map_tensors, named_tensors, static_values
from .timing import Timeline

# Called with a phase name of the log, gives the context manager to run that part in.
Phase = Callable[[str], contextlib.AbstractContextManager]

# How notes about the graphs of a decode begin.
GRAPH_NOTE = "CUDA graph: "

# A process whose allocator was left invalid under cudaMallocAsync can't capture again, whoever asks: this is a fact
# about the process, hence module level.
_no_more_captures: str | None = None


@dataclass(frozen=True)
class GraphKey:
    """Identity of a recording.

    tensors: (name, shape, stride, dtype, device) of every input. statics: every plain value the function may branch on,
    and the process-wide switches by which PyTorch picks kernels. weight_generation: grows whenever the weights are
    loaded or changed.
    """

    tensors: tuple[tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype, torch.device], ...]
    statics: tuple[tuple[str, Any], ...]
    weight_generation: int

    @classmethod
    def of(cls, inputs: Any, *, weight_generation: int) -> GraphKey:
        """Key of nested frozen dataclasses of tensors. Raises TypeError, naming the field, for a leaf that is neither a
        tensor nor a plain value, since the graph would bake it in."""
        tensors = tuple((n, tuple(t.shape), t.stride(), t.dtype, t.device) for n, t in named_tensors(inputs))
        return cls(tensors, static_values(inputs) + _kernel_switches(), weight_generation)

    @property
    def shape(self) -> tuple:
        """The key without the weights' generation: what a step costs depends on this alone."""
        return self.tensors, self.statics

    def differences(self, other: GraphKey) -> list[str]:
        """The fields in which two keys differ, as words."""
        mine, theirs = self._fields(), other._fields()
        return [
            f"{name}: {theirs.get(name, 'absent')} -> {mine.get(name, 'absent')}"
            for name in {**theirs, **mine}
            if mine.get(name) != theirs.get(name)
        ]

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            n: f"{list(shape)} {dtype}".replace("torch.", "") for n, shape, _, dtype, _ in self.tensors
        }
        fields |= {f"{n}.stride": stride for n, _, stride, _, _ in self.tensors}
        fields |= {f"{n}.device": str(device) for n, _, _, _, device in self.tensors}
        fields |= dict(self.statics)
        fields["weight generation"] = self.weight_generation
        return fields


def _kernel_switches() -> tuple[tuple[str, Any], ...]:
    """Switches that other code of the process may turn between renders; an eager step would follow them, a graph
    can't."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        ("kernels.sdp_flash", cuda.flash_sdp_enabled()),
        ("kernels.sdp_mem_efficient", cuda.mem_efficient_sdp_enabled()),
        ("kernels.sdp_math", cuda.math_sdp_enabled()),
        ("kernels.sdp_cudnn", cuda.cudnn_sdp_enabled()),
        ("kernels.matmul_tf32", _switch(cuda.matmul, "allow_tf32")),
        ("kernels.matmul_fp16_accumulation", cuda.matmul.allow_fp16_accumulation),
        ("kernels.matmul_bf16_reduction", str(cuda.matmul.allow_bf16_reduced_precision_reduction)),
        ("kernels.matmul_fp16_reduction", str(cuda.matmul.allow_fp16_reduced_precision_reduction)),
        ("kernels.blas", str(cuda.preferred_blas_library()) if torch.cuda.is_available() else "cpu"),
        ("kernels.cudnn_tf32", _switch(cudnn, "allow_tf32")),
        ("kernels.cudnn_deterministic", cudnn.deterministic),
        ("kernels.cudnn_benchmark", cudnn.benchmark),
        ("kernels.deterministic", torch.are_deterministic_algorithms_enabled()),
    )


def _switch(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except RuntimeError:  # torch >= 2.9, in a process that mixed its old and new TF32 switches
        return getattr(owner, "fp32_precision", "mixed")


@dataclass
class CaptureReport:
    """What one capture cost. graph_bytes: device memory that the recording holds, read after its first replay."""

    warmup_ms: float = 0.0
    capture_ms: float = 0.0
    first_replay_ms: float = 0.0
    static_bytes: int = 0
    graph_bytes: int = 0


class GraphedStep:
    """One recording: static inputs, graph, static outputs. It exists only if capture and first replay succeeded."""

    def __init__(self, graph, static_constants, static_inputs, outputs, report: CaptureReport, device: torch.device):
        self._graph = graph
        self._device = device
        self._constants = static_constants
        self._inputs = static_inputs
        self._outputs = outputs
        self._loaded_constants: Any = None
        self.report = report

    def load(self, constants: Any, inputs: Any) -> None:
        """Copy into the static buffers (same key): the inputs always, the constants when they are another object than
        last time."""
        if constants is not self._loaded_constants:
            _copy_into(self._constants, constants)
            self._loaded_constants = constants
        _copy_into(self._inputs, inputs)

    def replay(self) -> Any:
        """Replay over the loaded buffers. The outputs are the graph's own buffers: valid until the next replay."""
        self._graph.replay()
        return self._outputs

    def forget_constants(self) -> None:
        """Let go of the caller's constants (not of the static buffers), so that they can be freed between renders."""
        self._loaded_constants = None

    @property
    def closed(self) -> bool:
        return self._graph is None

    @property
    def device_bytes(self) -> int:
        return self.report.static_bytes + self.report.graph_bytes

    def close(self) -> None:
        """Drop outputs and graph. The device must be idle or the caller's stream must not need the outputs any more."""
        if self.closed:
            return
        torch.cuda.synchronize(self._device)
        graph, self._graph = self._graph, None
        self._outputs = self._inputs = self._constants = self._loaded_constants = None
        graph.reset()


@dataclass
class GraphCounters:
    """hits, misses, captures, evictions, fallbacks of one cache since it was made; last_miss says which fields
    differed."""

    hits: int = 0
    misses: int = 0
    captures: int = 0
    evictions: int = 0
    fallbacks: int = 0
    last_miss: list[str] = field(default_factory=list)


_MEASUREMENTS_KEPT = 256
# A guided two-stage render has up to ten kinds of steps (tests/test_graph_cache.py).
_MAX_GRAPHS = 16
# Of the card's memory, for all recordings together: four of 1536x1024x121 on an H200.
_MEMORY_SHARE = 8


class GraphCache:
    """Recordings of one function, bounded by number and by memory, least recently used first out.

    max_bytes: device memory of all recordings together, None for an eighth of the card. Recordings that the caller
    still needs may exceed it, so that no render records its own again and again.
    """

    def __init__(self, device: torch.device, *, max_graphs: int = _MAX_GRAPHS, max_bytes: int | None = None):
        self.device = device
        self.max_graphs = max_graphs
        self._max_bytes = max_bytes
        self.counters = GraphCounters()
        self._steps: OrderedDict[GraphKey, GraphedStep] = OrderedDict()
        self._measurements: OrderedDict[tuple, Any] = OrderedDict()  # by GraphKey.shape
        self._failed: dict[GraphKey, tuple[int, str]] = {}
        self._stream: torch.cuda.Stream | None = None

    def find(self, key: GraphKey) -> GraphedStep | None:
        """The recording for key, or None. Counts a hit or a miss; a miss keeps the fields that differ from the nearest
        key."""
        step = self._steps.get(key)
        if step is not None:
            self._steps.move_to_end(key)
            self.counters.hits += 1
            return step
        self.counters.misses += 1
        self.counters.last_miss = min((key.differences(k) for k in self._steps), key=len, default=["first use"])
        return None

    def __contains__(self, key: GraphKey) -> bool:
        """Without counting; see find."""
        return key in self._steps

    def measurement(self, key: GraphKey) -> Any:
        """What was remembered of steps of this shape, or None."""
        return self._measurements.get(key.shape)

    def remember(self, key: GraphKey, measurement: Any) -> None:
        """Keep what was measured of steps of this shape; the oldest of many goes."""
        self._measurements[key.shape] = measurement
        if len(self._measurements) > _MEASUREMENTS_KEPT:
            self._measurements.popitem(last=False)

    def forget_measurements(self) -> None:
        self._measurements.clear()

    def refusal(self, key: GraphKey) -> str | None:
        """Why this key may not be captured, or None. A key that failed once may be tried once more (class A)."""
        if _no_more_captures:
            return _no_more_captures
        failures, reason = self._failed.get(key, (0, ""))
        return f"captured twice without success: {reason}" if failures >= 2 else None

    def capture(
        self,
        key: GraphKey,
        fn: Callable[[Any, Any], Any],
        constants: Any,
        inputs: Any,
        phase: Phase,
        *,
        keep: Collection[GraphedStep] = (),
    ) -> tuple[GraphedStep, Any]:
        """Warm up, record fn(constants, inputs) and replay once. Returns (recording, outputs of that first replay).

        keep: recordings that must not make way. Raises CaptureError; the process is healthy afterwards, or the message
        says to restart.
        """
        # Old graphs go before the capture: destroying one inside it would invalidate it.
        while len(self._steps) >= self.max_graphs and self.evict_oldest(keep):
            pass
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        try:
            while True:
                try:
                    step, outputs = _record(fn, constants, inputs, self._stream, self.device, phase)
                    break
                except MemoryShortageError:
                    # Its own old recordings may make room; a lasting shortage is no failure of this key.
                    if not self.evict_oldest(keep):
                        raise
        except RestartRequiredError:
            raise
        except CaptureError as error:
            self.counters.fallbacks += 1
            if not isinstance(error, MemoryShortageError):
                failures, _ = self._failed.get(key, (0, ""))
                self._failed[key] = (failures + 1, str(error))
            raise
        self._failed.pop(key, None)
        self._steps[key] = step
        self.counters.captures += 1
        while self.device_bytes > self.max_bytes and self.evict_oldest((*keep, step)):
            pass
        return step, outputs

    def evict_oldest(self, keep: Collection[GraphedStep]) -> bool:
        """Drop the recording that was not used for longest, of those not in keep; False when there is none."""
        oldest = next((key for key, step in self._steps.items() if all(step is not kept for kept in keep)), None)
        if oldest is None:
            return False
        self._steps.pop(oldest).close()
        self.counters.evictions += 1
        return_graph_memory(self.device)
        return True

    @property
    def max_bytes(self) -> int:
        if self._max_bytes is None:
            self._max_bytes = torch.cuda.get_device_properties(self.device).total_memory // _MEMORY_SHARE
        return self._max_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory that the recordings hold."""
        return sum(step.device_bytes for step in self._steps.values())

    @property
    def seemingly_free_bytes(self) -> int:
        """What of device_bytes statistics count as free: under the native allocator a recording's intermediates lie in
        memory that is reserved for it, and nothing there counts as allocated."""
        if allocator_backend() != "native":
            return 0
        return sum(step.report.graph_bytes for step in self._steps.values())

    def __len__(self) -> int:
        return len(self._steps)

    def close(self) -> None:
        """Drop every recording and give its memory back. Idempotent; the cache can be used again."""
        self._failed.clear()
        if not self._steps:
            return
        while self._steps:
            self._steps.popitem()[1].close()
        return_graph_memory(self.device)


def _keep_for_ever(remains: Any) -> None:
    """What the async allocator must never see freed, not even while the interpreter shuts down: it would abort the
    process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(remains))


def note_graphs(timeline: Timeline, phase: str, words: str, *, eager: bool = False) -> None:
    """Note what became of the graphs of a decode. eager: it ran without, in whole or in part."""
    timeline.note(phase, GRAPH_NOTE + words, eager=eager)


def unavailable_reason(device: torch.device) -> str | None:
    """Why graphs can't be used on this device at all, or None."""
    if device.type != "cuda":
        return "no CUDA" if not torch.cuda.is_available() else f"the model is on {device.type}, not on CUDA"
    if torch.version.cuda is None:
        return "this PyTorch build has no CUDA (ROCm runs eager)"
    return _no_more_captures


def allocator_backend() -> str:
    """"native", "cudaMallocAsync", or "cpu"."""
    return torch.cuda.get_allocator_backend() if torch.cuda.is_available() else "cpu"


def _static_like(tree: Any) -> Any:
    """Buffers of the same layout, made outside inference mode: a tensor made inside refuses copy_ outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        return map_tensors(lambda _, t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device), tree)


def _copy_into(static: Any, source: Any) -> None:
    for (_, buffer), (_, value) in zip(named_tensors(static), named_tensors(source)):
        buffer.copy_(value)


def _record(fn, constants, inputs, stream, device, phase) -> tuple[GraphedStep, Any]:
    """A recording and the outputs of its first replay. Raises CaptureError for whatever PyTorch or CUDA refuses; the
    process is healthy then, or RestartRequiredError says that it isn't."""
    try:
        return _recorded(fn, constants, inputs, stream, device, phase)
    except CaptureError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):  # cuBLAS and cuDNN raise a plain RuntimeError
            raise
        words = str(error).splitlines()[0]
        # The traceback holds the frames, and with them the memory.
        error.__traceback__ = None
    torch.cuda.empty_cache()
    _check_health(device)
    raise MemoryShortageError(f"not captured: {words}. Make the clip smaller or unload other models.")


def _recorded(fn, constants, inputs, stream, device, phase) -> tuple[GraphedStep, Any]:
    report = CaptureReport()
    with phase("sample.warmup"):
        started = time.perf_counter()
        static_constants, static_inputs = _static_like(constants), _static_like(inputs)
        _copy_into(static_constants, constants)
        _copy_into(static_inputs, inputs)
        warm_outputs, needed_bytes = _warm_up(lambda: fn(static_constants, static_inputs), stream, device)
        static_outputs = _static_like(warm_outputs)
        del warm_outputs
        report.warmup_ms = (time.perf_counter() - started) * 1e3
    trees = (static_constants, static_inputs, static_outputs)
    report.static_bytes = sum(t.numel() * t.element_size() for tree in trees for _, t in named_tensors(tree))
    with phase("sample.capture"):
        # The warm-up's blocks belong to the capture stream; freed, the recording finds room for its own.
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info(device)[0]
        if needed_bytes > free_bytes:
            raise MemoryShortageError(
                f"not captured: the step needs {needed_bytes / 2**20:.0f} MiB of intermediates of its own and "
                f"{free_bytes / 2**20:.0f} MiB are free on {device}. Make the clip smaller or unload other models."
            )
        before = held_bytes(device)
        started = time.perf_counter()
        graph = _guarded_capture(
            lambda: _copy_into(static_outputs, fn(static_constants, static_inputs)), stream, device
        )
        report.capture_ms = (time.perf_counter() - started) * 1e3
        started = time.perf_counter()
        _first_replay(graph, device)
        report.first_replay_ms = (time.perf_counter() - started) * 1e3
        report.graph_bytes = max(held_bytes(device) - before, 0)
    step = GraphedStep(graph, static_constants, static_inputs, static_outputs, report, device)
    step._loaded_constants = constants
    return step, static_outputs


def _warm_up(body: Callable[[], Any], stream, device) -> tuple[Any, int]:
    """One eager pass on the capture stream. Returns its outputs and its peak bytes. Raises CaptureError when it waits
    for the device anywhere, in Python or below: in a capture that would be fatal."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), host_waits.host_waits_seen() as waits:
        outputs = body()
    stream.synchronize()
    if waits:
        raise CaptureError(f"not captured: the step waits for the device at {waits[0]}")
    return outputs, torch.cuda.max_memory_allocated(device) - before


def _guarded_capture(body: Callable[[], None], stream, device):
    """Record body() on stream. Returns the graph or raises CaptureError after cleaning up."""
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    torch.cuda.synchronize(device)
    error = None
    closed = False
    gc.collect()
    # A collected CUDAGraph would invalidate the capture.
    with no_garbage_collection(), torch.cuda.stream(stream):
        # thread_local: in the default mode a harmless CUDA call of any other thread (previews, pinned memory) would
        # invalidate the capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            with host_waits.NoHostWaits():
                body()
        except BaseException as raised:  # noqa: BLE001 - an interrupt too must close the capture; raised again below
            error = raised
        try:
            graph.capture_end()
            closed = True
        except RuntimeError as end_error:
            error = error or end_error
    if error is None:
        return graph
    where = _innermost_line(error)
    words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'} ({where})"
    if closed:
        _discard_closed_capture(graph, error, device)
    else:
        _discard_invalidated_capture(graph, pool, error, stream, device)
    if not isinstance(error, Exception):
        # An interrupt. A new one: the frames of the first may hold tensors that must stay alive.
        raise type(error)(*error.args) from None
    _check_health(device)
    raise CaptureError(f"capture failed: {words}. The render goes on eager; set cuda_graph=off to not try.")


def _discard_closed_capture(graph, error, device) -> None:
    """Class A. The partial graph is replayed once, so that the async allocator knows its addresses before the tensors
    made inside die; it writes only its own memory."""
    try:
        graph.replay()
        torch.cuda.synchronize(device)
    except RuntimeError as replay_error:
        _keep_for_ever((graph, error, replay_error))
        return
    _clear_frames(error)
    graph.reset()


def _discard_invalidated_capture(graph, pool, error, stream, device) -> None:
    """Class B. CUDA dropped the capture, PyTorch still thinks it runs: end the pool, reset, release, heal the
    generator."""
    global _no_more_captures
    index = device.index if device.index is not None else torch.cuda.current_device()
    try:
        end_allocating = getattr(torch._C, "_cuda_endAllocateToPool", None)  # its name from torch 2.8 on
        (end_allocating or torch._C._cuda_endAllocateCurrentStreamToPool)(index, pool)
        graph.reset()
        torch._C._cuda_releasePool(index, pool)
    except (AttributeError, RuntimeError) as cleanup_error:
        _no_more_captures = (
            f"an earlier capture left the allocator in a state that could not be repaired ({cleanup_error})"
        )
        _keep_for_ever((graph, error))
        return
    if allocator_backend() == "cudaMallocAsync":
        # Its frames hold tensors the allocator must never see freed, and later captures fail every second time.
        _keep_for_ever(error)
        _no_more_captures = (
            "an earlier capture was invalidated under cudaMallocAsync, so no further capture is made in this process; "
            "restart ComfyUI to capture again (--disable-cuda-malloc is the safer setting)"
        )
    _heal_generator(stream, device)


def _heal_generator(stream, device) -> None:
    """The default CUDA generator still believes it is captured; the next capture that closes resets that.

    It allocates nothing: after an invalidated capture an allocation inside another one may fail under cudaMallocAsync.
    """
    probe = torch.empty(1, device=device)
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        probe.normal_()
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize(device)
    graph.reset()


def _first_replay(graph, device) -> None:
    """Replay once and wait. Under cudaMallocAsync memory becomes real here, so this is where a full card shows."""
    try:
        graph.replay()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        _keep_for_ever((graph, error))
        _check_health(device)
        words = str(error).splitlines()[0]
        raise CaptureError(f"the first replay failed: {words}. The render goes on eager.") from None


def _check_health(device) -> None:
    """A small eager computation and a random draw. Raises RestartRequiredError when the process can't go on."""
    try:
        probe = torch.ones(64, 64, device=device)
        healthy = float((probe @ probe).sum()) == 64.0**3 and bool(torch.randn(8, device=device).isfinite().all())
    except RuntimeError as error:
        raise RestartRequiredError(
            f"restart ComfyUI: after a failed capture this process can't use the GPU any more ({error})"
        ) from None
    if not healthy:
        raise RestartRequiredError("restart ComfyUI: after a failed capture this process computes wrong results")


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Cycles stay where they are until the end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _innermost_line(error: BaseException) -> str:
    """Where error was raised, or what was called there that host_waits refused."""
    frame = error.__traceback__
    if frame is None:
        return "unknown place"
    while frame.tb_next is not None and frame.tb_next.tb_frame.f_code.co_filename != host_waits.__file__:
        frame = frame.tb_next
    code = frame.tb_frame.f_code
    return f"{code.co_filename.replace(chr(92), '/').rsplit('/', 1)[-1]}:{frame.tb_lineno} in {code.co_name}"


def _clear_frames(error: BaseException) -> None:
    """Let go of the tensors that the frames of a handled exception still hold."""
    frame = error.__traceback__
    while frame is not None:
        with contextlib.suppress(RuntimeError):  # a frame that still runs (our own) can't be cleared
            frame.tb_frame.clear()
        frame = frame.tb_next


# Graph memory of cudaMallocAsync is in no PyTorch statistic; the driver counts it (CUDA Driver API,
# cuDeviceGetGraphMemAttribute).
_GRAPH_MEM_RESERVED_CURRENT = 2


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def graph_memory_bytes(device: torch.device) -> int | None:
    """Bytes the driver has reserved for graph allocations on device, or None when the driver can't be asked."""
    driver = _driver()
    if driver is None:
        return None
    value = ctypes.c_uint64()
    index = device.index if device.index is not None else torch.cuda.current_device()
    handle = ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(handle), index):
        return None
    failed = driver.cuDeviceGetGraphMemAttribute(handle, _GRAPH_MEM_RESERVED_CURRENT, ctypes.byref(value))
    return None if failed else value.value


def held_bytes(device: torch.device) -> int:
    """Device memory this process holds: PyTorch's reserved memory plus the driver's graph memory."""
    return torch.cuda.memory_reserved(device) + (graph_memory_bytes(device) or 0)


def return_graph_memory(device: torch.device) -> None:
    """Give memory of dropped recordings back: the allocator's cache, and under cudaMallocAsync the driver's graph
    memory."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    driver = _driver()
    handle = ctypes.c_int()
    index = device.index if device.index is not None else torch.cuda.current_device()
    if driver is not None and not driver.cuDeviceGet(ctypes.byref(handle), index):
        driver.cuDeviceGraphMemTrim(handle)
