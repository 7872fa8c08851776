"""The Trace Event Format, as far as Perfetto and chrome://tracing insist on it.

Source: "Trace Event Format" (Chromium's catapult project), sections JSON Object Format, Complete, Instant, Counter and
Metadata Events. No parser of it can be installed here: Perfetto's own fetches a binary.
"""

import math

METADATA = {"process_name": str, "thread_name": str, "thread_sort_index": int}


def problems_of(trace: dict) -> list[str]:
    """What is wrong with a trace object, one line each; empty for a good one."""
    found = []
    if trace.get("displayTimeUnit") not in ("ms", "ns"):
        found.append(f"displayTimeUnit is {trace.get('displayTimeUnit')!r}")
    events = trace["traceEvents"]
    for number, event in enumerate(events):
        found += [f"event {number} {event.get('name')!r}: {what}" for what in _problems_of_event(event)]
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    latest: dict[tuple, float] = {}
    for event in events:
        if event["pid"] not in processes:
            found.append(f"{event['name']!r}: process {event['pid']} has no name")
        if event["ph"] != "X":
            continue
        track = (event["pid"], event["tid"])
        if track not in threads:
            found.append(f"{event['name']!r}: track {track} has no name")
        if event["ts"] < latest.get(track, 0.0):
            found.append(f"{event['name']!r}: begins before the slice that stands before it on track {track}")
        latest[track] = event["ts"]
    return found


def _problems_of_event(event: dict) -> list[str]:
    kind = event.get("ph")
    found = []
    if not (isinstance(event.get("name"), str) and event["name"]):
        found.append("no name")
    if not _whole(event.get("pid")) or (kind != "C" and not _whole(event.get("tid"))):
        found.append(f"pid {event.get('pid')!r}, tid {event.get('tid')!r}")
    if not isinstance(event.get("args", {}), dict):
        found.append("args is no object")
    if kind == "M":
        wanted = METADATA.get(event.get("name"))
        value = next(iter(event.get("args", {}).values()), None)
        return found + ([] if wanted and isinstance(value, wanted) else [f"metadata with {event.get('args')}"])
    if not _time(event.get("ts")):
        found.append(f"ts is {event.get('ts')!r}")
    if kind == "X" and not _time(event.get("dur")):
        found.append(f"dur is {event.get('dur')!r}")
    if kind == "i" and event.get("s") not in ("g", "p", "t"):
        found.append(f"scope is {event.get('s')!r}")
    if kind == "C" and not (event.get("args") and all(_number(value) for value in event["args"].values())):
        found.append(f"counter of {event.get('args')}")
    if kind not in ("X", "i", "C"):
        found.append(f"kind {kind!r} is none that the log has use for")
    return found


def _number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _time(value) -> bool:
    return _number(value) and value >= 0
