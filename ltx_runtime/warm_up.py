"""Capture before it is needed, so that a served request never captures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .request import check_request
from .sampler import SampleRequest, prepare
from .step_runner import StepRunner, check_graphs_allowed
from .timing import Timeline


def warm_up(
    model, request: SampleRequest, *, timeline: Timeline | None = None, on_capture_failure: str = "eager"
) -> dict:
    """Record the step of a request without rendering it. Returns the account, as in `SampleResult.graph`.

    A later `sample` with cuda_graph "on" or "auto" replays at once when its shapes are those of the request; seed,
    prompt (up to 1024 tokens), frame rate and sigmas may differ. Costs one eager step, one recording and one replay,
    shown as the phases sample.warmup and sample.capture. Raises what `sample` raises before its first step.
    """
    timeline = timeline or Timeline(None, device=model.device)
    check_request(request, model.config)
    check_graphs_allowed(model.device, cuda_graph="on", on_capture_failure=on_capture_failure)
    model.ensure_resident(timeline)
    with torch.inference_mode():
        prepared = prepare(model, request, timeline)
        with StepRunner(
            model,
            prepared.constants,
            len(prepared.coefficients),
            timeline,
            cuda_graph="on",
            on_capture_failure=on_capture_failure,
            on_finished=lambda index: None,
        ) as runner:
            # Steps of one kind share their constants: one recording each.
            for index in {id(constants): i for i, constants in reversed(list(enumerate(prepared.constants)))}.values():
                runner.capture_ahead(index, prepared.inputs(index, prepared.start, prepared.start))
    return runner.account


def recorded_words(graph: Mapping[str, Any]) -> str:
    """What a warm-up left behind, from its account (`SampleResult.graph`)."""
    if graph.get("fallback"):
        return f"nothing recorded: {graph['fallback']}"
    capture = graph.get("capture")
    if capture is None:
        return "recorded already: the next render of this shape replays at once"
    took_ms = capture["warmup_ms"] + capture["capture_ms"] + capture["first_replay_ms"]
    held = (capture["static_bytes"] + capture["graph_bytes"]) / 2**20
    return f"recorded in {took_ms:.0f} ms, holds {held:.0f} MiB: the next render of this shape replays at once"
