"""Inspections of many folders as the table that `scute inspect` prints."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from scute.cli.findings import device_bytes, listed
from scute.cli.output import counted, print_table
from scute.errors import printable

if TYPE_CHECKING:
    from scute.admission.inspection import Inspection
    from scute.costs import Base

COLUMNS = ("adapter", "method", "rank", "slots", "bytes on disk", "on the device", "warnings", "verdict")
DEEP_COLUMNS = ("|s - 1|", "|R - I|", "delta W")
"""The largest of all projections: of |s - 1| and |R - I| an entry, of delta W the norm."""


def as_row(found: "Inspection", base: "Base | None", deep: bool) -> tuple[str, ...]:
    """The cells of COLUMNS, and of DEEP_COLUMNS if the look was deep."""
    rank = slots = device = ""
    if found.description is not None and base is not None:
        rank = listed(found.description.sizes)
        slots = " ".join(found.description.live_slots) or "none"
        device = f"{device_bytes(found, base)[0]:,}"
    elif found.facts.rank is not None:
        rank = str(found.facts.rank)
    more = len(found.reasons) + found.reasons_left_out - 1
    verdict = "served" if base is not None else "no objection"
    if found.reasons:
        verdict = f"{found.reasons[0].code}{f' and {more:,} more' if more else ''}"
    cells = (
        printable(found.name),
        found.facts.method or "",
        rank,
        slots,
        f"{found.disk_bytes:,}",
        device,
        str(len(found.warnings) or ""),
        verdict,
    )
    return (*cells, *_largest(found)) if deep else cells


def _largest(found: "Inspection") -> Iterator[str]:
    for field in ("scale_max", "rotation_max", "delta_norm"):
        values = [value for layer in found.deviations if (value := getattr(layer, field)) is not None]
        yield f"{max(values):.3g}" if values else ""


def print_many(rows: Sequence[tuple[str, ...]], deep: bool) -> None:
    """One table, and where to find what it counts only."""
    print_table((*COLUMNS, *DEEP_COLUMNS) if deep else COLUMNS, rows)
    typer.echo(f"{counted(len(rows), 'adapter')}. One by one, or with --json, every reason and warning is told.")
