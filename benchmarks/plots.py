"""Figures of serving times, from committed rows; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rows import ServeRow
from serving import summary

METHODS = {"lora": "LoRA", "dora": "DoRA", "ia3": "(IA)³", "vera": "VeRA", "oft": "OFT"}
UNITS = {"decode": "time per token, ms (median)", "prefill": "time to first token, ms (mean)"}


def draw(rows: Sequence[ServeRow], folder: Path) -> list[Path]:
    """Write the figures that the rows have data for; returns their paths."""
    import matplotlib

    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    made = [_arms(rows, folder, "decode"), _arms(rows, folder, "prefill"), _tenants(rows, folder), _rates(rows, folder)]
    return [path for path in made if path is not None]


def _arms(rows: Sequence[ServeRow], folder: Path, kind: str) -> Path | None:
    """Every arm of the two mixed pools under a burst: the median as a bar, each repetition as a point."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.times is not None and summary.load_of(row) == f"{kind}:burst" and "-methods" in row.tenants.pool:
            found.setdefault(f"{row.arm}, {row.tenants.pool}", {}).setdefault(row.run, []).append(summary.value(row))
    if not found:
        return None
    figure, axes = _figure(6, 0.6 + 0.35 * len(found))
    for place, (name, runs) in enumerate(reversed(found.items())):
        values = runs[max(runs)]
        axes.barh(place, np.median(values), color="#4477aa" if name.startswith("scute") else "#bbbbbb")
        axes.plot(values, [place] * len(values), "k.", markersize=3)
    axes.set_yticks(range(len(found)), list(reversed(found)))
    axes.set_xlabel(UNITS[kind])
    return _save(figure, folder / f"serve-{kind}.svg")


def _tenants(rows: Sequence[ServeRow], folder: Path) -> Path | None:
    """Decode time against the number of tenants of one method, as in the paper's Figure 3."""
    measured = summary.times(rows, "decode:burst")
    figure, axes = _figure(6, 4)
    for method, label in METHODS.items():
        for arm in dict.fromkeys(arm for _, arm in measured):
            points = sorted(
                (int(pool.rpartition("-")[2]), ms)
                for (pool, of), ms in measured.items()
                if of == arm and pool.rpartition("-")[0] == method
            )
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=f"{label}, {arm}")
    if not axes.lines:
        return None
    axes.set(xlabel="tenants", ylabel=UNITS["decode"], ylim=(0, None))
    axes.legend()
    return _save(figure, folder / "serve-tenants.svg")


def _rates(rows: Sequence[ServeRow], folder: Path) -> Path | None:
    """Time against the arrival rate, five methods."""
    figure, axes = _figure(6, 4)
    points: dict[tuple[str, str], dict[float, list[float]]] = {}
    for row in rows:
        if row.times is not None and row.stream.rate is not None and row.tenants.pool == "five-methods":
            values = points.setdefault((row.stream.kind, row.arm), {}).setdefault(row.stream.rate, [])
            values.append(summary.value(row))
    for (kind, arm), rates in points.items():
        ordered = sorted(rates)
        axes.plot(ordered, [np.median(rates[rate]) for rate in ordered], marker="o", label=f"{kind}, {arm}")
    if not points:
        return None
    axes.set(xlabel="requests a second", ylabel="ms", ylim=(0, None))
    axes.legend()
    return _save(figure, folder / "serve-rates.svg")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height))


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return path
