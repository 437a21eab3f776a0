"""The demo's result: one row for the base model and one per adapter, as a table or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from scute.agreement import Agreement
from scute.demo.footprint import Footprint
from scute.demo.pool import Tenant

RATIO_BOUND = 0.0001
"""Largest error of an adapter, as a share of its effect; both sides compute in float32."""
BASE_BOUND = 0.001
"""Largest error of the base model beside the adapters, in nats per token."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report; the base model has no effect, no slots and nothing of its own."""

    name: str
    method: str
    live_slots: tuple[str, ...]
    owned_bytes: int
    effect: float
    error: float
    ratio: float | None
    within_bound: bool
    sample: str


def base_row(error: float, sample: str) -> Row:
    """error: in nats per token."""
    return Row("base", "none", (), 0, 0.0, error, None, error <= BASE_BOUND, sample)


def adapter_row(tenant: Tenant, footprint: Footprint, agreement: Agreement, sample: str) -> Row:
    """One tenant, held against RATIO_BOUND."""
    return Row(
        tenant.name,
        tenant.method,
        footprint.live_slots,
        footprint.owned_bytes,
        agreement.effect,
        agreement.error,
        agreement.ratio,
        agreement.ratio <= RATIO_BOUND,
        sample,
    )


def to_json(rows: Sequence[Row]) -> str:
    """The rows with their bounds; numbers as in the table, unrounded."""
    bounds = {"ratio_bound": RATIO_BOUND, "base_bound": BASE_BOUND}
    return json.dumps({**bounds, "rows": [asdict(row) for row in rows]}, indent=2)


def to_table(rows: Sequence[Row]) -> Table:
    """The rows as a table for a terminal of 120 columns."""
    table = Table(
        title="One batch, every method, against the PEFT library in float32",
        caption=f"effect: what the adapter changes, in nats per token (mean). error: the engine against the PEFT "
        f"library, at most {RATIO_BOUND:.2%} of the effect, and {BASE_BOUND} nats per token on the base model.",
    )
    for heading in ("adapter", "method", "live slots"):
        table.add_column(heading, no_wrap=True)
    for heading in ("owned", "effect", "error / effect"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("first answer", overflow="fold")
    for row in rows:
        table.add_row(*_cells(row), style=None if row.within_bound else "bold red")
    return table


def _cells(row: Row) -> tuple[str, ...]:
    is_base = row.ratio is None
    return (
        row.name,
        "" if is_base else row.method,
        " ".join(row.live_slots),
        "" if is_base else f"{row.owned_bytes / 2**10:,.0f} KiB",
        "" if is_base else f"{row.effect:.3f}",
        f"{row.error:.1e} nats" if row.ratio is None else f"{row.ratio:.1e}",
        " ".join(row.sample.split()),
    )
