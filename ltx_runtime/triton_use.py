"""Whether Triton kernels can run here: asked before every one, and learnt from the first of an owner's that can't be
built. And how they are launched.

An owner is what the kernels are for ("vocoder", "conv video VAE", "denoiser"): it does without all of its kernels when
one can't be built, and the others keep theirs.
"""
from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from .memory import is_out_of_memory

if TYPE_CHECKING:
    from .timing import Timeline

logger = logging.getLogger("ltxgraph")

# Why the kernels of an owner (None: of all) can't run in this process, found out by a launch: a fact about the process,
# hence module level.
_failures: dict[str | None, str] = {}
# Whose kernels have run in this process.
_used: set[str] = set()
# What Triton has compiled in this process, by all that it compiles for, and the values of constexpr arguments.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def triton_refusal(device: torch.device, dtype: torch.dtype, owner: str) -> str | None:
    """Why the owner's Triton kernels are not for tensors of this kind, None where they are."""
    failure = _failures.get(None) or _failures.get(owner)
    if failure is not None:
        return failure
    if device.type != "cuda":
        return f"no kernel for {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{str(dtype).removeprefix('torch.')} is not for tensor cores"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    return import_refusal("triton")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launch in it: Triton takes the current device and its stream, whatever holds the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def note_first_use(owner: str, timeline: Timeline, phase: str) -> None:
    """Note once a process why the owner of some kernels, about to run them, may be slow this time."""
    if owner not in _used:
        _used.add(owner)
        timeline.note(
            phase,
            f"{owner}: Triton kernels are compiled at their first use on a machine, which can take half a minute; "
            "later they come from Triton's cache",
        )


def launch(kernel: Any, grid: tuple[int, ...], *args: Tensor | float | None, **options: Any) -> None:
    """kernel[grid](*args, **options), of a @triton.jit function whose first argument is a tensor; inside a capture too,
    wherever its tensors were made. Launch in the device of the tensors (on_device).

    args: all that is not constexpr. options: constexpr arguments, and those of the compiler.

    Triton asks the driver about the address of every tensor it is given, and under cudaMallocAsync the driver knows
    none that was allocated inside a capture ("cannot be accessed from Triton"). An address that comes as a number is
    not asked about. And what it compiled for arguments of one kind is found again here, in less time than Triton
    takes, which matters where the host is what a step waits for.
    A torch function mode sees the call, as it sees PyTorch's own: launches are counted that way (gpu_time.py).
    """
    if has_torch_function_unary(args[0]):
        handle_torch_function(launch, args[:1], kernel, grid, *args, **options)
        return
    if not args[0].is_cuda or torch.version.hip is not None:  # the interpreter; pointers of kinds that we don't know
        kernel[grid](*args, **options)
        return
    device = args[0].get_device()
    numbers, kinds = _numbers_and_kinds(args)
    key = (kernel, device, kinds, *options.items(), *map(type, options.values()))
    known = _compiled.get(key)
    if known is None:
        known = _compiled[key] = _compile(kernel, grid, args, options)
    compiled, constants = known
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled[(*grid, 1, 1)[:3]](*numbers, *constants, stream=stream)


def _compile(
    kernel: Any, grid: tuple[int, ...], args: tuple[Tensor | float | None, ...], options: dict[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """What Triton compiles for these arguments, and the values of the kernel's constexpr arguments."""
    constants = kernel.arg_names[len(args) :]
    by_place = [kernel.arg_names[place] for place in kernel.constexprs if place < len(args)]
    if by_place or not set(constants) <= options.keys():
        names = ", ".join(by_place or constants)
        raise TypeError(f"{kernel.__name__}: give all constexpr arguments by name, and no others: {names}")
    return kernel.warmup(*args, grid=grid, **options), tuple(options[name] for name in constants)


def _numbers_and_kinds(args: tuple[Tensor | float | None, ...]) -> tuple[list[float | None], tuple[Any, ...]]:
    """args with the addresses of tensors, and what Triton may compile differently for: at least as fine as its own
    distinctions (dtype and alignment of a tensor; whether an integer is 1, divisible by 16, of 32 or 64 bits)."""
    numbers: list[float | None] = []
    kinds: list[Any] = []
    for value in args:
        if isinstance(value, Tensor):
            address = value.data_ptr()
            numbers.append(address)
            kinds.append(value.dtype)
            kinds.append(address & 15 == 0)
        else:
            numbers.append(value)
            kinds.append(type(value))
            if type(value) is int:
                kinds.append(value & 15 == 0 if value != 1 and -(1 << 31) <= value < 1 << 31 else (value,))
    return numbers, tuple(kinds)


def try_triton(run: Callable[[], None], owner: str, kernel: str, device: torch.device) -> bool:
    """Run what launches kernels for tensors on this device; False, and from then on a refusal for its owner, where it
    can't be built: for all owners where the machine is why.

    kernel: its name, for the log.
    """
    try:
        with on_device(device):
            run()
    except Exception as error:
        if is_out_of_memory(error):  # of the tensors, or of the kernel's own code
            raise
        # Triton builds a launcher with the system's C compiler and raises what its parts raise. In a capture the error
        # is the capture's.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise
        failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        _failures[None if _is_of_the_machine(error) else owner] = failure
        logger.warning("%s, %s: the Triton kernel can't run here (%s); a slower one does", owner, kernel, error)
        return False
    return True


def _is_of_the_machine(error: Exception) -> bool:
    """Whether it is the C compiler that builds launchers which is missing or fails: so it does for every kernel."""
    return "C compiler" in str(error) or isinstance(error, subprocess.CalledProcessError)


@functools.cache
def import_refusal(module: str) -> str | None:
    """Why a module can't be imported, None where it can."""
    if importlib.util.find_spec(module) is None:
        return "not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        return f"can't be imported ({type(error).__name__}: {error})"
    return None
