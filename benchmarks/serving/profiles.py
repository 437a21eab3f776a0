"""Rows of profiles, and their table: the device's time of every arm of a cell, side by side."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator
from rows import Served

from serving.summary import load_of
from serving.traces import DeviceTime, Family


class ProfileRow(Served):
    """One untimed stream through one engine, under the profiler, whose cost is in it."""

    benchmark: Literal["profile"] = "profile"
    device_time: DeviceTime

    @model_validator(mode="after")
    def _no_profile_without_proof(self) -> Self:
        self.require_proof("a profile")
        return self


def read(paths: Iterable[Path]) -> list[ProfileRow]:
    """The profiles in the files; other rows are left out."""
    lines = (line for path in paths for line in path.read_text().splitlines())
    return [ProfileRow.model_validate_json(line) for line in lines if '"benchmark":"profile"' in line]


def table(rows: Iterable[ProfileRow]) -> str:
    """Plain text: a table of the newest run of every cell. Milliseconds, and numbers of events in brackets.

    A dash is a family of which the arm has nothing, or so little that it is in "other".
    """
    cells: dict[tuple[str, str], dict[str, list[ProfileRow]]] = {}
    for row in rows:
        cells.setdefault((row.tenants.pool, load_of(row)), {}).setdefault(row.run, []).append(row)
    return "\n\n".join(_cell(" ".join(name), runs[max(runs)]) for name, runs in cells.items())


def _cell(cell: str, rows: Sequence[ProfileRow]) -> str:
    times = [row.device_time for row in rows]
    stream = rows[0].stream
    title = f"{cell}, {stream.requests} requests, {stream.prompt_tokens} + {stream.output_tokens} tokens"
    lines = [
        [title, *(row.arm for row in rows)],
        ["span", *(_number(time.span, time.events) for time in times)],
        ["busy", *(_number(time.busy) for time in times)],
        ["idle", *(_number(time.idle) for time in times)],
        ["idle, gaps > 50 µs", *(_number(time.gap_ms, time.gaps) for time in times)],
    ]
    by_name = [{family.name: family for family in time.families} for time in times]
    longest: dict[str, float] = {}
    for family in (family for time in times for family in time.families):
        longest[family.name] = max(family.ms, longest.get(family.name, 0.0))
    for name in sorted(longest, key=lambda name: (name == "other", -longest[name])):
        lines.append([name, *(_family(families.get(name)) for families in by_name)])
    return _aligned(lines)


def _family(family: Family | None) -> str:
    return "–" if family is None else _number(family.ms, family.launches)


def _number(ms: float, count: int | None = None) -> str:
    return f"{ms:.2f}" if count is None else f"{ms:.2f} ({count})"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, others, strict=True))])
        for name, *cells in lines
    )
