"""An inspection as `scute inspect` prints it: text of one folder, a row of a table, JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from scute.cli.output import counted, print_reason, print_table
from scute.errors import printable

if TYPE_CHECKING:
    from scute.admission.inspection import Inspection
    from scute.costs import Base

COLUMNS = ("adapter", "method", "rank", "slots", "bytes on disk", "on the device", "warnings", "verdict")
DEEP_COLUMNS = ("|s - 1|", "|R - I|", "delta W")
"""The largest of all projections: of |s - 1| and |R - I| an entry, of delta W the norm."""


def as_json(found: "Inspection", base: "Base | None") -> dict[str, Any]:
    """Everything; `served` is null where no base model was given and nothing is wrong."""
    told: dict[str, Any] = {
        "adapter": printable(str(found.folder)),
        "served": False if found.reasons else True if found.form else None,
        "disk_bytes": found.disk_bytes,
    }
    told |= {"method": found.facts.method, "config": asdict(found.facts), "warnings": list(found.warnings)}
    if found.reasons:
        told |= {"code": found.reasons[0].code, "sentence": found.reasons[0].sentence}
        told["reasons"] = [{"code": reason.code, "sentence": reason.sentence} for reason in found.reasons]
        told["reasons_left_out"] = found.reasons_left_out
    if found.description is not None and base is not None:
        packed, pair = _bytes(found, base)
        told |= {**asdict(found.description), "live_slots": found.description.live_slots}
        told |= {"engine": found.description.engine_needs, "packed_bytes": packed, "pair_bytes": pair}
        told["deviations"] = [asdict(layer) for layer in found.deviations]
    return told


def as_row(found: "Inspection", base: "Base | None", deep: bool) -> tuple[str, ...]:
    """The cells of COLUMNS, and of DEEP_COLUMNS if the look was deep."""
    rank = slots = device = ""
    if found.description is not None and base is not None:
        rank = _listed(found.description.sizes)
        slots = " ".join(found.description.live_slots) or "none"
        device = f"{_bytes(found, base)[0]:,}"
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


def print_one(found: "Inspection", base: "Base | None") -> None:
    """The reasons first, then what is known, the slots, and the deviations."""
    for number, reason in enumerate(found.reasons):
        print_reason(reason, "also" if number else "refused")
    if found.reasons_left_out:
        typer.echo(f"and {counted(found.reasons_left_out, 'more reason')}, which are not kept")
    for name, value in _lines(found, base):
        typer.echo(f"{name:13} {value}")
    if found.description is not None and found.description.slots:
        print_table(
            ("slot", "projections", "becomes", "because"),
            [
                (use.slot, str(use.num_projections), f"part of {use.into}" if use.into else "live", use.reason)
                for use in found.description.slots
            ],
        )
    if found.deviations:
        headings = ("projection", "|s - 1| median", "max", "|R - I| largest", "norm", "norm of delta W")
        print_table(headings, [_deviation_cells(asdict(layer)) for layer in found.deviations])


def _lines(found: "Inspection", base: "Base | None") -> Iterator[tuple[str, str]]:
    facts, description = found.facts, found.description
    yield "method", facts.method or "unknown"
    yield "PEFT", facts.peft_version or "version unknown"
    yield "targets", _listed(facts.targets)
    if description is not None and base is not None:
        packed, pair = _bytes(found, base)
        yield "projections", str(description.num_projections)
        yield "ranks", _listed(description.ranks)
        yield "shared ranks", _listed(description.shared_ranks)
        yield "blocks of R", _listed(description.rotation_widths)
        yield "live slots", _listed(description.live_slots)
        yield "bytes owned", f"{description.owned_bytes:,}"
        yield "bytes shared", f"{description.shared_bytes:,}"
        yield "packed", f"{packed:,} bytes on the host, and on the device while active"
        yield "pair", f"{pair:,} bytes on the device, once for all adapters that share it" if pair else "none"
        yield "engine", _listed([f"{name} >= {least}" for name, least in description.engine_needs.items()])
    elif base is None:
        yield "rank", str(facts.rank or "unknown")
        yield "slots", "give --base to see them"
    yield "on disk", f"{found.disk_bytes:,} bytes"
    yield from (("warning", warning) for warning in found.warnings)


def _bytes(found: "Inspection", base: "Base") -> tuple[int, int]:
    """Of the packed adapter, and of its shared pair."""
    from scute.costs import Tenant, pair_bytes

    assert found.form is not None
    tenant = Tenant.of(found.form, base, found.name)
    return tenant.packed_bytes(base), pair_bytes([tenant], base)


def _deviation_cells(layer: dict[str, Any]) -> tuple[str, ...]:
    name, *values = layer.values()
    return (str(name), *("" if value is None else f"{value:.3g}" for value in values))


def _listed(values: Any) -> str:
    return ", ".join(str(value) for value in values) or "none"
