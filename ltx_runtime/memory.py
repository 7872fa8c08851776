"""How much device memory a render takes beside the weights: asked before it starts, so that room can be made."""
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .runtime import TransformerModel
    from .sampler import SampleRequest

# Values of one block alive at once, per token and unit of width: residual, norm, q, k, v, attention and rotations (about
# 12), the feed-forward's hidden layer and its activation (8), and what the allocator rounds up.
_VALUES_PER_TOKEN = 24


def sampling_bytes(model: TransformerModel, request: SampleRequest, *, recorded: bool) -> int:
    """Estimate of the activations of one step, from the shapes and the file's dtype. Neither reads weights nor the device.

    recorded: a CUDA graph of the step keeps as much again for itself.
    """
    config = model.config
    weight = next(spec for name, spec in model.header.tensors.items() if name.endswith("patchify_proj.weight"))
    item_bytes = weight.num_bytes // weight.num_elements
    values = 0
    for state, width in ((request.video, config.video_width), (request.audio, config.audio_width)):
        if state is not None:
            values += state.shape.batch * state.tokens * width * _VALUES_PER_TOKEN
    return values * item_bytes * (2 if recorded else 1)
