"""What issue 3 asks of an H200, against the rows: the tables of docs/speed.md."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import rows
from rows import ServeRow
from steps.record import Row

from serving import summary
from serving.summary import Comparison, Ratio

POOL = "five-methods"
LOADS = ("decode:burst", "prefill:burst")
MISSING = "not measured yet"
RESERVED, OWNED = 4422.6, 4365.8
"""MiB of the pool in tests/engine/test_memory.py; tests/docs/test_speed.py holds them against it."""


class Bound(NamedTuple):
    """limit: the largest ratio, or the least where `at_least`. goal: what the issue aims at beyond it."""

    words: str
    limit: float
    goal: str
    at_least: bool = False
    unit: str = ""

    def line(self, measured: Ratio | None, shown: str | None = None) -> tuple[str, str, str]:
        """The line of the table, the verdict, and a short form for lists."""
        text = MISSING if measured is None else shown or "{:.3f} [{:.3f}, {:.3f}]".format(*measured[:3])
        sign = "≥" if self.at_least else "≤"
        asked = f"{sign} {self.limit:.2f}{self.unit}"
        verdict = self.verdict(measured)
        cells = (self.words, asked, self.goal, text, "" if measured is None else verdict)
        short = self.words if measured is None else f"{self.words}: {text.partition(' [')[0]}, asked {asked}"
        return "| " + " | ".join(cells) + " |", verdict, short

    def verdict(self, measured: Ratio | None) -> str:
        """Met if the whole interval is within, not met if the median is not, and open in between. Not rounded."""
        if measured is None:
            return MISSING
        inside = measured.median >= self.limit if self.at_least else measured.median <= self.limit
        within = measured.low >= self.limit if self.at_least else measured.high <= self.limit
        return "met" if within else "open" if inside else "not met"


DECODE, PREFILL = LOADS
FIVE = "five methods / "
SERVED: Sequence[tuple[str, str, str, Bound]] = (
    ("scute/own", "stock-tuned/lora", DECODE, Bound(FIVE + "LoRA-only, stock tuned, decode", 0.90, "0.80")),
    ("scute/own", "stock/lora", DECODE, Bound(FIVE + "LoRA-only, stock as shipped, decode", 0.60, "0.50")),
    ("scute/own", "base/base", DECODE, Bound(FIVE + "base model, decode", 1.40, "1.25")),
    ("scute/own", "base/base", PREFILL, Bound(FIVE + "base model, prefill", 1.35, "1.20")),
    ("scute/lora", "stock-tuned/lora", DECODE, Bound("LoRA-only / the same, stock tuned, decode", 0.85, "0.75")),
    ("scute/lora", "stock-tuned/lora", PREFILL, Bound("LoRA-only / the same, stock tuned, prefill", 0.85, "0.75")),
    (
        "stock-tuned-256/converted",
        "scute/own",
        DECODE,
        Bound("conversions, stock tuned / five methods, decode", 2.0, "2.5", at_least=True),
    ),
    ("scute/base", "base/base", DECODE, Bound("base rows alone / base model, decode", 1.02, "1.00")),
    ("scute/base", "base/base", PREFILL, Bound("base rows alone / base model, prefill", 1.02, "1.00")),
)
KERNELS = ("lora-16", POOL)
BYTES = Bound("adapter work of a decode step / its bytes and launches", 2.0, "1.5")
MEMORY = Bound("GPU memory reserved / bytes owned", 1.25, "1.1")
TENANT = Bound("time that a VeRA or (IA)³ tenant adds, 1 to 16 tenants", 0.03, "flat", unit=" ms")


def page(paths: Iterable[Path]) -> str:
    """Markdown: every bound with what was measured, then the times behind it."""
    paths = list(paths)
    served = rows.read(paths)
    return "\n\n".join([_bounds(served, kernel_rows(paths)), f"{_arms(served)} {summary.provenance(served)}"])


def kernel_rows(paths: Iterable[Path]) -> list[Row]:
    lines = (line for path in paths for line in path.read_text().splitlines())
    return [Row.model_validate_json(line) for line in lines if '"benchmark":"kernels"' in line]


def _bounds(served: Sequence[ServeRow], kernels: Sequence[Row]) -> str:
    lines = [
        bound.line(summary.ratio(served, Comparison(POOL, ours, other, bound.words), load))
        for ours, other, load, bound in SERVED
    ]
    lines.append(BYTES.line(*_bytes(kernels)))
    lines.append(MEMORY.line(_exactly(RESERVED / OWNED), f"{RESERVED / OWNED:.3f}, computed"))
    lines.append(TENANT.line(*_slopes(served)))
    told = ["| ratio | bound | aim | measured | |", "|---|---|---|---|---|", *(line for line, _, _ in lines)]
    for verdict in ("not met", "open", MISSING):
        if names := [short for _, of, short in lines if of == verdict]:
            told += ["", f"{verdict.capitalize()}: {'; '.join(names)}."]
    return "\n".join(told)


def _bytes(kernels: Sequence[Row]) -> tuple[Ratio | None, str | None]:
    """The largest ratio of the newest rows of the two pools; known only if both are."""
    found = {}
    for row in kernels:
        p = row.performance
        if row.engine == "scute" and row.tokens == 64 and not row.dry and p and p.adapters and p.bound:
            found[row.case] = p.adapters / p.bound
    if not set(KERNELS) <= set(found):
        return None, None
    return _exactly(max(found[case] for case in KERNELS)), ", ".join(f"{found[c]:.2f} ({c})" for c in KERNELS)


def _slopes(served: Sequence[ServeRow]) -> tuple[Ratio | None, str | None]:
    found = {name: summary.slope(served, method) for name, method in (("VeRA", "vera"), ("(IA)³", "ia3"))}
    known = {name: ms for name, ms in found.items() if ms is not None}
    if len(known) < len(found):
        return None, None
    return _exactly(max(known.values())), ", ".join(f"{ms:.3f} ms ({name})" for name, ms in known.items())


def _exactly(value: float) -> Ratio:
    return Ratio(value, value, value, 1)


def _arms(served: Sequence[ServeRow]) -> str:
    """Medians and ranges over the repetitions of the newest run of the five-method pool, under bursts."""
    timed = [row for row in served if row.times and row.tenants.pool == POOL and summary.load_of(row) in LOADS]
    runs = {arm: max(row.run for row in timed if row.arm == arm) for arm in dict.fromkeys(row.arm for row in timed)}
    lines = [
        "| engine/served | time per token, decoding, ms | time to first token, prefill, ms | prefill stream, s "
        "| largest error / effect |",
        "|---|---|---|---|---|",
    ]
    for arm, run in runs.items():
        own = [row for row in timed if row.arm == arm and row.run == run]
        loads = {load: [row for row in own if summary.load_of(row) == load] for load in LOADS}
        seconds = [row.times.seconds for row in loads[PREFILL] if row.times]
        worst = max(row.correctness.worst for row in own if row.correctness)
        cells = [
            _spread([summary.value(row) for row in loads[DECODE]], 2),
            _spread([summary.value(row) for row in loads[PREFILL]], 0),
            _spread(seconds, 2),
            "–" if arm.endswith("/base") else f"{100 * worst:.2f} %",
        ]
        lines.append(f"| `{arm}` | " + " | ".join(cells) + " |")
    repetitions = sorted({row.repetition for row in timed if row.run in runs.values()})
    note = f"Median (smallest to largest) of {len(repetitions)} repetitions."
    return "\n".join([*lines, "", note])


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    return f"{np.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
