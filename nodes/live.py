"""The timeline widget's sources: what a node sends while it runs, its `ui` entry, the log of a render on request."""
from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from ..ltx_runtime.parity import Verdict
from ..ltx_runtime.report_text import Render, residency
from ..ltx_runtime.timeline_view import RENDER_ID, compact, read_timeline
from ..ltx_runtime.timing import Timeline

MESSAGE = "ltxgraph.phase"
OUTPUT = "ltxgraph_timeline"
ROUTE = "/ltxgraph/timeline/{render}"  # ?events=N: only the first N
_EVERY_S = 0.1


class Feed:
    """Tells the browser that queued the running prompt what happens in one timeline, at most ten times a second.

    server: ComfyUI's PromptServer; None sends nothing. head: what every message says of the node. Hand `wake` to the
    timeline as on_event, set `timeline`, and `close` when the node leaves. The rendering thread only wakes the server's
    thread, which reads the events and makes the message.

    Message: head, render, first (index of the first event in the render's log), events (`timeline_view.compact`), done.
    """

    def __init__(self, server: Any, head: Mapping[str, Any]):
        self.timeline: Timeline | None = None
        self._server = server
        self._head = head
        self._lock = threading.Lock()
        self._asked = False
        self._sent = 0

    def wake(self, _event: dict) -> None:
        """on_event of the timeline."""
        if self._asked or self._server is None:
            return
        self._asked = True
        loop = self._server.loop
        try:
            loop.call_soon_threadsafe(loop.call_later, _EVERY_S, self._flush)
        except RuntimeError:  # the loop is closed: ComfyUI is going down, the render need not
            self._server = None

    def close(self) -> None:
        """Send what is left, so that it arrives before ComfyUI's own message of the node's end."""
        self._flush(done=True)

    def _flush(self, done: bool = False) -> None:
        self._asked = False  # before the events are read: a later one asks again
        with self._lock:
            if self._server is None or self.timeline is None:
                return
            events = self.timeline.events[self._sent :]
            if not events and not done:
                return
            data = {
                **self._head,
                "render": self.timeline.render_id,
                "first": self._sent,
                "events": [compact(event) for event in events],
                "done": done,
            }
            self._sent += len(events)
            try:
                self._server.send_sync(MESSAGE, data, self._server.client_id)
            except RuntimeError:
                self._server = None


def shown(renders: Mapping[str, Render], verdict: Verdict | None = None) -> dict[str, list[str]]:
    """A node's `ui` entry, by which the widget knows its renders (by arm), how far they were (number of events), and
    what was found about them.

    One JSON text, because ComfyUI counts objects in a `ui` entry as files that the job made.
    """
    view: dict[str, Any] = {
        "renders": [
            {
                "render": render.timeline.render_id,
                "name": name,
                "events": len(render.timeline.events),
                "residency": residency(render)["words"],
            }
            for name, render in renders.items()
        ]
    }
    if verdict is not None:
        view["verdict"] = {"status": verdict.status, "words": verdict.words}
    return {OUTPUT: [json.dumps(view)]}


def log_handler(log_path: Callable[[str], Path]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The handler of ROUTE. log_path: where the log of a render id is."""

    async def answer(request: web.Request) -> web.Response:
        render, most = request.match_info["render"], request.query.get("events")
        if not RENDER_ID.fullmatch(render) or (most is not None and not re.fullmatch("[0-9]{1,9}", most)):
            return web.json_response({"error": "this is no render id, or no number of events"}, status=400)
        path = log_path(render)
        try:
            if path.resolve().parent != path.parent.resolve():  # a link to somewhere else
                raise FileNotFoundError(path)
            view = await asyncio.to_thread(read_timeline, path, int(most) if most else None)
        except (OSError, ValueError, KeyError):
            return web.json_response({"error": f"there is no log of render {render}"}, status=404)
        return web.json_response(view)

    return answer
