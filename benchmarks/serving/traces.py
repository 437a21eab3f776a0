"""Where a device's time went, from the trace that vLLM's torch profiler writes."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rows import Record

from serving.families import family_of

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LONG_GAP = 50.0  # microseconds; a launch that the host keeps up with leaves far less
FAMILIES = 15

Event = dict[str, Any]


class Family(Record):
    """Events of one kind of work. ms: the sum of their lengths."""

    name: str
    launches: int
    ms: float


class DeviceTime(Record):
    """Of one stream, in milliseconds. source: whether these are events of a device, or a CPU engine's operators.

    span: from the first event's start to the last one's end. busy: at least one event ran; idle: none did.
    gaps: idle times of more than 50 µs; gap_ms: their sum. families: the longest first, and "other" for the rest;
    their sum exceeds `busy` where events overlap.
    """

    source: str
    span: float
    busy: float
    idle: float
    events: int
    gaps: int
    gap_ms: float
    families: list[Family]


def read(path: Path) -> DeviceTime:
    """From a trace in Chrome's JSON. Raises ValueError for one without events."""
    events = [event for event in json.loads(path.read_bytes())["traceEvents"] if event.get("ph") == "X"]
    if device := [event for event in events if event.get("cat") in DEVICE]:
        return device_time("device", device)
    return device_time("cpu", list(_outermost(event for event in events if event.get("cat") == "cpu_op")))


def device_time(source: str, events: Sequence[Event]) -> DeviceTime:
    """events: with `name`, and with `ts` and `dur` in microseconds, in any order."""
    if not events:
        raise ValueError("the trace has no events")
    ordered = sorted(events, key=lambda event: event["ts"])
    starts = np.asarray([event["ts"] for event in ordered], dtype=np.float64)
    reached = np.maximum.accumulate(starts + [event["dur"] for event in ordered])
    gaps = np.maximum(starts[1:] - reached[:-1], 0)
    span, idle, long = reached[-1] - starts[0], gaps.sum(), gaps[gaps > LONG_GAP]
    return DeviceTime(
        source=source,
        span=_ms(span),
        busy=_ms(span - idle),
        idle=_ms(idle),
        events=len(events),
        gaps=len(long),
        gap_ms=_ms(long.sum()),
        families=_families(events),
    )


def _families(events: Sequence[Event]) -> list[Family]:
    found: dict[str, list[float]] = {}
    for event in events:
        found.setdefault(event["name"], []).append(event["dur"])
    merged: dict[str, list[float]] = {}
    for name, lengths in found.items():
        merged.setdefault(family_of(name), []).extend(lengths)
    ordered = sorted(merged.items(), key=lambda item: -sum(item[1]))
    if rest := [length for _, lengths in ordered[FAMILIES:] for length in lengths]:
        ordered = [*ordered[:FAMILIES], ("other", rest)]
    return [Family(name=name, launches=len(lengths), ms=_ms(sum(lengths))) for name, lengths in ordered]


def _outermost(events: Iterable[Event]) -> Iterator[Event]:
    """Those that no other event of their thread encloses."""
    ends: dict[tuple[Any, Any], float] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        thread = event["pid"], event["tid"]
        if event["ts"] >= ends.get(thread, -np.inf):
            ends[thread] = event["ts"] + event["dur"]
            yield event


def _ms(microseconds: float) -> float:
    return round(float(microseconds) / 1000, 4)
