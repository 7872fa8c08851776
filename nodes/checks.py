"""What ComfyUI leaves to a node to check of its inputs."""

from __future__ import annotations

from typing import Any, TypeVar

from comfy_api.latest import io

from ..ltx_runtime.errors import RequestError

Value = TypeVar("Value")


def check_socket(value: Any, wanted: type[Value], name: str, source: str) -> Value:
    """The value of input `name`. Raises RequestError unless it is of the type that `source`, a node, gives: switches,
    reroutes and wildcard sockets of other packs hand on nothing, or anything."""
    if isinstance(value, wanted):
        return value
    came = "nothing" if value is None else f"a {type(value).__name__}"
    raise RequestError(f"{name}: {came} came. Connect {source}, and look at the nodes between (switches, reroutes).")


def known_number(value: Any) -> int | float | None:
    """A widget's number, or None: an input that is linked is None until the node runs, and ComfyUI asks validate_inputs
    about text that it has itself refused as a number."""
    return value if isinstance(value, (int, float)) else None


def out_of_range(node: type[io.ComfyNode], **values: float | None) -> str | None:
    """Why one of these inputs is beyond the limits in the node's schema; None when all are known to be inside.

    ComfyUI holds no input to its limits that validate_inputs names.
    """
    limits = {given.id: given for given in node.define_schema().inputs}
    for name, value in values.items():
        low, high = limits[name].min, limits[name].max
        if value is not None and not low <= value <= high:
            return f"{name}={value}: it must lie between {low} and {high}."
    return None
