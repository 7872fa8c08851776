"""A workflow in ComfyUI's UI format (schema 0.4), laid out in columns, from the descriptions of /object_info."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO"
CORE_VERSION, PACK_VERSION = "0.30.0", "0.1.0"
TITLE_HEIGHT = 30
GAP = 60
# What web/js/timeline_widget.js adds to a node, and the pictures that parity nodes show below it.
TIMELINE, PICTURES = 194, 216
SHOWN_HEIGHT = {
    "LTXGraphSampler": TIMELINE,
    "LTXGraphVideoDecode": TIMELINE,
    "LTXGraphTimingParity": TIMELINE + PICTURES,
    "LTXGraphParityRun": TIMELINE + PICTURES,
}
HUGGING_FACE = "https://huggingface.co/Lightricks/LTX-2.5/resolve/main"

Link = tuple[int, int]  # node id, output slot


class Canvas:
    """Nodes are put one below another into the column that was opened last."""

    def __init__(self, object_info: dict[str, dict]):
        self._object_info = object_info
        self._nodes: dict[int, dict] = {}
        self._links: list[list] = []
        self._groups: list[dict] = []
        self._x = self._y = self._width = 0

    def column(self, x: int, width: int = 430, y: int = 0) -> None:
        """Following nodes stand at x and are this wide, the first at y."""
        self._x, self._y, self._width = x, y, width

    def note(self, text: str, height: int) -> None:
        self._place(
            {"type": "MarkdownNote", "properties": {}, "widgets_values": [text], "title": "About"},
            height,
            {"color": "#432", "bgcolor": "#653"},
        )

    def add(
        self,
        class_type: str,
        *,
        title: str | None = None,
        node_height: int | None = None,
        download: tuple[str, str] | None = None,
        node_id: int | None = None,
        **inputs: Any,
    ) -> int:
        """Add a node and return its id. inputs: widget values, or a Link; what is not named has its default.

        download: (folder, file) that ComfyUI should offer to download.
        """
        info = self._object_info[class_type]
        own = class_type.startswith("LTXGraph")
        properties: dict[str, Any] = {
            "cnr_id": "ltxgraph" if own else "comfy-core",
            "ver": PACK_VERSION if own else CORE_VERSION,
            "Node name for S&R": class_type,
        }
        if download:
            folder, file = download
            url = f"{HUGGING_FACE}/{folder}/{file}"
            properties["models"] = [{"name": file, "url": url, "directory": folder}]
        sockets, widgets, values = _split_inputs(info, dict(inputs))
        outputs = [
            {"name": name, "type": kind, "links": None} for kind, name in zip(info["output"], info["output_name"])
        ]
        node = {"type": class_type, "inputs": sockets + widgets, "outputs": outputs, "properties": properties}
        node["widgets_values"] = values
        if title:
            node["title"] = title
        rows = max(len(sockets), len(outputs))
        height = max(60, 20 * rows + 24 * len(values) + 14) + SHOWN_HEIGHT.get(class_type, 0)
        node_id = self._place(node, node_height or height, {}, node_id)
        for index, socket in enumerate(sockets + widgets):
            if isinstance(inputs.get(socket["name"]), tuple):
                self._connect(inputs[socket["name"]], node_id, index)
        return node_id

    @contextlib.contextmanager
    def group(self, title: str, color: str = "#3f789e") -> Iterator[None]:
        """A frame around the nodes that are added inside."""
        before = set(self._nodes)
        yield
        boxes = [(*n["pos"], *n["size"]) for node_id, n in self._nodes.items() if node_id not in before]
        left, top = min(x for x, *_ in boxes) - 20, min(y for _, y, *_ in boxes) - 80
        right, bottom = max(x + w for x, _, w, _ in boxes) + 20, max(y + h for _, y, _, h in boxes) + 20
        frame = {"id": len(self._groups) + 1, "title": title, "bounding": [left, top, right - left, bottom - top]}
        self._groups.append(frame | {"color": color, "font_size": 24, "flags": {}})

    def ui(self, name: str) -> dict:
        """The workflow as ComfyUI's browser saves it."""
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"ltxgraph/{name}")),
            "revision": 0,
            "last_node_id": max(self._nodes),
            "last_link_id": len(self._links),
            "nodes": list(self._nodes.values()),
            "links": self._links,
            "groups": self._groups,
            "config": {},
            "extra": {"ds": {"scale": 0.6, "offset": [500, 200]}},
            "version": 0.4,
        }

    def _place(self, node: dict, height: int, colours: dict[str, str], node_id: int | None = None) -> int:
        # Ids that are asked for lie above these, so that a workflow with and one without them number the others alike.
        node_id = node_id or 1 + max((taken for taken in self._nodes if taken < 100), default=0)
        self._nodes[node_id] = {
            "id": node_id,
            "type": node.pop("type"),
            "pos": [self._x, self._y],
            "size": [self._width, height],
            "flags": {},
            "order": len(self._nodes),
            "mode": 0,
            "inputs": node.pop("inputs", []),
            "outputs": node.pop("outputs", []),
            **node,
            **colours,
        }
        self._y += height + TITLE_HEIGHT + GAP
        return node_id

    def _connect(self, link: Link, target: int, index: int) -> None:
        source, slot = link
        link_id = len(self._links) + 1
        output = self._nodes[source]["outputs"][slot]
        output["links"] = [*(output["links"] or []), link_id]
        self._nodes[target]["inputs"][index]["link"] = link_id
        self._links.append([link_id, source, slot, target, index, output["type"]])


def _split_inputs(info: dict, given: dict[str, Any]) -> tuple[list[dict], list[dict], list]:
    """(sockets, sockets of widgets, widget values) of a node. Raises KeyError for a name that the node doesn't have."""
    sockets, widgets, values = [], [], []
    for kind in ("required", "optional"):
        for name in info["input_order"].get(kind, []):
            type_name, *rest = info["input"][kind][name]
            options = rest[0] if rest else {}
            choices = type_name if isinstance(type_name, list) else options.get("options")
            type_name = "COMBO" if isinstance(type_name, list) else type_name
            value = given.pop(name, None)
            socket = {"name": name, **({"shape": 7} if kind == "optional" else {}), "type": type_name, "link": None}
            is_widget = type_name in WIDGET_TYPES or type_name.startswith(DYNAMIC_COMBO)
            if not is_widget or options.get("forceInput"):
                sockets.append(socket)
                continue
            widgets.append(socket | {"widget": {"name": name}})
            if value is None or isinstance(value, tuple):
                value = _default(type_name, options, choices)
            values.append(float(value) if type_name == "FLOAT" else value)
            if options.get("control_after_generate"):
                values.append("fixed")
    if given:
        raise KeyError(f"no such input: {', '.join(given)}")
    return sockets, widgets, values


def _default(type_name: str, options: dict, choices: Sequence | None) -> Any:
    if options.get("default") is not None:
        return options["default"]
    if type_name.startswith(DYNAMIC_COMBO):
        return options["options"][0]["key"]
    return choices[0] if choices else options.get("min", 0)
