"""Rows to ratios: medians over repetitions, with percentile-bootstrap intervals (paper, appendix G)."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rows import Served, ServeRow

START, END = "<!-- serving times: python benchmarks/serve.py table --write -->", "<!-- end of serving times -->"
RESAMPLES = 10_000
COVERAGE = 0.95


class Ratio(NamedTuple):
    """Median of per-repetition ratios, and its interval."""

    median: float
    low: float
    high: float
    repetitions: int

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Comparison(NamedTuple):
    """The time of one arm over that of another, in one pool; arms are ENGINE/VARIANT."""

    pool: str
    ours: str
    other: str
    words: str


FIVE, FOUR = "Five methods, 20 tenants", "Four methods, 16 tenants"
COMPARISONS = (
    Comparison("five-methods", "scute/own", "stock-tuned/lora", f"{FIVE} / plain LoRA in vLLM, tuned"),
    Comparison("five-methods", "scute/own", "stock/lora", f"{FIVE} / plain LoRA in vLLM as shipped"),
    Comparison("five-methods", "scute/own", "base/base", f"{FIVE} / base model without LoRA"),
    Comparison("without-vera", "scute/own", "stock-tuned/lora", f"{FOUR} / plain LoRA in vLLM, tuned"),
    Comparison("without-vera", "scute/own", "stock/lora", f"{FOUR} / plain LoRA in vLLM as shipped"),
    Comparison("five-methods", "scute/lora", "stock-tuned/lora", "Plain LoRA, 20 tenants / the same in vLLM, tuned"),
    Comparison("five-methods", "scute/lora", "stock/lora", "Plain LoRA, 20 tenants / the same in vLLM as shipped"),
    Comparison("mixed-ranks", "scute/own", "stock-tuned-256/own", "LoRA of ranks 8 to 256 / the same in vLLM, tuned"),
    Comparison("five-methods", "scute/base", "base/base", "Base rows alone / base model without LoRA"),
    Comparison(
        "five-methods", "stock-tuned-256/converted", "scute/own", f"{FIVE}, converted, in vLLM, tuned / as they are"
    ),
    Comparison(
        "five-methods", "stock-256/converted", "scute/own", f"{FIVE}, converted, in vLLM as shipped / as they are"
    ),
    Comparison(
        "five-methods-64",
        "stock-tuned-64/converted",
        "scute/own",
        f"{FIVE}, converted, VeRA at rank 64, in vLLM, tuned / as they are",
    ),
    Comparison(
        "without-vera",
        "stock-tuned-64/converted",
        "scute/own",
        f"{FOUR}, converted, in vLLM, tuned / as they are",
    ),
)


def value(row: ServeRow) -> float:
    """What the paper compares, in ms: median time per token when decoding, mean time to the first token otherwise."""
    assert row.times is not None
    return row.times.token.median if row.stream.kind == "decode" else row.times.first_token.mean


def load_of(row: Served) -> str:
    rate = "burst" if row.stream.rate is None else f"{row.stream.rate:g}"
    return ":".join([row.stream.kind, rate, *([row.stream.popularity] if row.stream.popularity != "turns" else [])])


def ratio(rows: Sequence[ServeRow], comparison: Comparison, load: str) -> Ratio | None:
    """From the newest run that timed both arms; None if there is no such run."""
    runs: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        if row.times is not None and row.tenants.pool == comparison.pool and load_of(row) == load:
            runs.setdefault(row.run, {}).setdefault(row.arm, {})[row.repetition] = value(row)
    for run in sorted(runs, reverse=True):
        ours, other = (runs[run].get(arm, {}) for arm in (comparison.ours, comparison.other))
        if both := sorted(ours.keys() & other.keys()):
            return interval([ours[repetition] / other[repetition] for repetition in both])
    return None


def interval(values: Sequence[float]) -> Ratio:
    """The median, and the central 95 % of the medians of resampled repetitions."""
    sample = np.asarray(values)
    draws = np.random.default_rng(0).choice(sample, (RESAMPLES, len(sample)))
    tail = 50 * (1 - COVERAGE)
    low, high = np.percentile(np.median(draws, axis=1), (tail, 100 - tail))
    return Ratio(float(np.median(sample)), float(low), float(high), len(sample))


def times(rows: Iterable[ServeRow], load: str) -> dict[tuple[str, str], float]:
    """Median over repetitions of `value`, by (pool, arm), of the newest run that has it."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        if row.times is not None and load_of(row) == load:
            found.setdefault((row.tenants.pool, row.arm), {}).setdefault(row.run, []).append(value(row))
    return {cell: float(np.median(runs[max(runs)])) for cell, runs in found.items()}


def slope(rows: Iterable[ServeRow], method: str, arm: str = "scute/own") -> float | None:
    """Decode time that a tenant adds, in ms: least squares over the pools of one method (paper, Table A9)."""
    measured = times(rows, "decode:burst")
    points = {
        int(pool.removeprefix(f"{method}-")): ms
        for (pool, of), ms in measured.items()
        if of == arm and pool.removeprefix(f"{method}-").isdigit()
    }
    return float(np.polyfit(list(points), list(points.values()), 1)[0]) if len(points) > 1 else None


def table(rows: Sequence[ServeRow]) -> str:
    """Markdown: every comparison that the rows allow, under a burst, and where it was measured."""
    lines = [
        "| a burst of requests, Scute / other | time per token, decoding | time to first token, prefill |",
        "|---|---|---|",
    ]
    for comparison in COMPARISONS:
        cells = [ratio(rows, comparison, load) for load in ("decode:burst", "prefill:burst")]
        if any(cells):
            lines.append(f"| {comparison.words} | " + " | ".join(str(cell or "–") for cell in cells) + " |")
    words = {"vera": "VeRA", "ia3": "(IA)³", "oft": "OFT", "dora": "DoRA", "lora": "LoRA"}
    slopes = {words[method]: ms for method in words if (ms := slope(rows, method)) is not None}
    if slopes:
        lines += [
            "",
            "A tenant more adds, per token: " + ", ".join(f"{m} {ms:.3f} ms" for m, ms in slopes.items()) + ".",
        ]
    return "\n".join([*lines, "", provenance(rows)])


def provenance(rows: Sequence[ServeRow]) -> str:
    """Where the rows were measured, as a sentence."""

    def told(values: Iterable[object]) -> str:
        return " and ".join(dict.fromkeys(map(str, values)))

    return (
        f"{told(row.environment.device for row in rows)}, vLLM {told(row.environment.vllm for row in rows)}, "
        f"{told(row.model for row in rows)} in {told(row.dtype for row in rows)}, "
        f"commit {told(_short_commit(row.environment.commit) for row in rows)}."
    )


def _short_commit(commit: str) -> str:
    return commit.removesuffix("+")[:7] + "+" * commit.endswith("+")


def between_markers(readme: str) -> str:
    """What stands between the markers. Raises ValueError where they are not there."""
    if START not in readme or END not in readme:
        raise ValueError(f"the page has no place for the table: {START} and {END}")
    return readme.partition(START)[2].partition(END)[0].strip()


def write(page: Path, text: str) -> None:
    """Put the table between the markers of a page."""
    before = page.read_text()
    between_markers(before)
    head, _, rest = before.partition(START)
    tail = rest.partition(END)[2]
    page.write_text(f"{head}{START}\n\n{text}\n\n{END}{tail}")
