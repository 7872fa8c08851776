"""Where do two renders part? Fingerprints of all that a denoising loop passes through, from a run of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .parity import Digest, PendingDigest, start_digest
from .request import SampleRequest
from .runtime import TransformerModel
from .sampler import denoise, prepare
from .step_runner import StepRunner
from .steps import StepInputs, StepOutputs
from .tensor_tree import named_tensors
from .timing import Timeline


def trace_stages(
    model: TransformerModel,
    request: SampleRequest,
    *,
    cuda_graph: str,
    check_cancelled: Callable[[], None] = lambda: None,
) -> list[tuple[str, Digest]]:
    """Run the request's loop once and give (stage, fingerprint) in the order of the render: contexts, the other
    constants of the loop, the start latents, the latents after every step.

    Digests are queued between the steps, without a copy and without a wait. The weights must be resident.
    cuda_graph: "off" or "on". Raises what `sample` raises, CaptureError included.
    """
    with torch.inference_mode():
        timeline = Timeline(None, device=model.device)
        model.contexts.clear()
        prepared = prepare(model, request, timeline)
        stages = _prepared_stages(prepared)
        with StepRunner(
            model,
            prepared.constants,
            len(prepared.constants),
            timeline,
            cuda_graph=cuda_graph,
            on_capture_failure="error",
            on_finished=lambda index: None,
        ) as runner:
            denoise(prepared, request, _Traced(runner, stages), check_cancelled, None)
        return [(name, pending.read()) for name, pending in stages]


def _prepared_stages(prepared) -> list[tuple[str, PendingDigest]]:
    kinds = list({id(constants): constants for constants in prepared.constants}.values())
    contexts, others = [], []
    for number, constants in enumerate(kinds):
        where = f"of step kind {number + 1}, " if len(kinds) > 1 else ""
        for name, tensor in named_tensors(constants):
            is_context = name.endswith(".context")
            stage = f"{'context' if is_context else 'constant'} ({where}{name})"
            (contexts if is_context else others).append((stage, start_digest(tensor)))
    start = [
        (f"start {name}", start_digest(tokens))
        for name, tokens in zip(("latent", "audio latent"), prepared.start)
        if tokens is not None
    ]
    return [*contexts, *others, *start]


class _Traced:
    """A step runner that fingerprints what each step leaves."""

    def __init__(self, runner: StepRunner, stages: list[tuple[str, PendingDigest]]):
        self._runner = runner
        self._stages = stages

    def run(self, index: int, inputs: StepInputs) -> StepOutputs:
        outputs = self._runner.run(index, inputs)
        for name, stream in (("latent", outputs.video), ("audio latent", outputs.audio)):
            if stream is not None:
                self._stages.append((f"step {index + 1} {name}", start_digest(stream.x)))
        return outputs
