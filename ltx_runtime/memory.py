"""How much device memory a render takes beside the weights, asked before it starts, so that room can be made; and how
much is free."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .config import TransformerConfig
from .errors import LTXError

if TYPE_CHECKING:
    from .checkpoint import CheckpointHeader
    from .sampler import SampleRequest

# Values of one block alive at once, per token and unit of width: residual, norm, q, k, v, attention (8), the
# feed-forward's hidden layer before and after its activation (8). h200_baseline.md section 3 measured 9 (fused) to 14
# (ComfyUI).
_VALUES_PER_TOKEN = 16


# CUDA and its libraries say it in words only; cuDNN has no plan left when none gets its workspace.
_OUT_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "unable to find an engine",
    "Unable to find a valid cuDNN algorithm",
)


class DeviceMemoryError(LTXError, torch.OutOfMemoryError):
    """The device has too little memory for the smallest plan too. Also PyTorch's own error, so that a host which frees
    its models at one does so."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def sampling_bytes(config: TransformerConfig, request: SampleRequest, *, item_bytes: int, recorded: bool) -> int:
    """Estimate of the activations of one step. Touches neither weights nor device.

    item_bytes: of one activation. recorded: a CUDA graph of the step keeps as much again for itself.
    """
    values = 0
    for state, width in ((request.video, config.video_width), (request.audio, config.audio_width)):
        if state is not None:
            samples = state.shape.batch * request.passes_at_once
            values += samples * state.tokens * width * _VALUES_PER_TOKEN
    return values * item_bytes * (2 if recorded else 1)


def activation_item_bytes(header: CheckpointHeader) -> int:
    """Bytes of one activation of a transformer file: activations have the dtype of its matrices."""
    weight = next(spec for name, spec in header.tensors.items() if name.endswith("patchify_proj.weight"))
    return weight.num_bytes // weight.num_elements


def device_free_bytes(device: torch.device) -> int | None:
    """Memory still to be had on this device, the allocator's own reserve included; None where nothing tells it."""
    if device.type != "cuda":
        return available_host_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def available_host_bytes() -> int | None:
    """Host memory that can be had without swapping, or None where the system does not tell (no /proc/meminfo)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def in_words(num_bytes: int) -> str:
    """12.3 MiB, 4.56 GiB, the units of the phase log."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
