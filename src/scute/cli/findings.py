"""An inspection of one folder as `scute inspect` prints it: text, JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from scute.cli.output import counted, print_reason, print_table
from scute.errors import printable

if TYPE_CHECKING:
    from scute.admission.inspection import Inspection
    from scute.costs import Base


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
        packed, pair = device_bytes(found, base)
        told |= {**asdict(found.description), "live_slots": found.description.live_slots}
        told |= {"engine": found.description.engine_needs, "packed_bytes": packed, "pair_bytes": pair}
        told["deviations"] = [asdict(layer) for layer in found.deviations]
    return told


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
    yield "targets", listed(facts.targets)
    if description is not None and base is not None:
        packed, pair = device_bytes(found, base)
        yield "projections", str(description.num_projections)
        yield "ranks", listed(description.ranks)
        yield "shared ranks", listed(description.shared_ranks)
        yield "blocks of R", listed(description.rotation_widths)
        yield "live slots", listed(description.live_slots)
        yield "bytes owned", f"{description.owned_bytes:,}"
        yield "bytes shared", f"{description.shared_bytes:,}"
        yield "packed", f"{packed:,} bytes on the host, and on the device while active"
        yield "pair", f"{pair:,} bytes on the device, once for all adapters that share it" if pair else "none"
        yield "engine", listed([f"{name} >= {least}" for name, least in description.engine_needs.items()])
    elif base is None:
        yield "rank", str(facts.rank or "unknown")
        yield "slots", "give --base to see them"
    yield "on disk", f"{found.disk_bytes:,} bytes"
    yield from (("warning", warning) for warning in found.warnings)


def device_bytes(found: "Inspection", base: "Base") -> tuple[int, int]:
    """Of the packed adapter, and of its shared pair."""
    from scute.costs import Tenant, pair_bytes

    assert found.form is not None
    tenant = Tenant.of(found.form, base, found.name)
    return tenant.packed_bytes(base), pair_bytes([tenant], base)


def _deviation_cells(layer: dict[str, Any]) -> tuple[str, ...]:
    name, *values = layer.values()
    return (str(name), *("" if value is None else f"{value:.3g}" for value in values))


def listed(values: Any) -> str:
    return ", ".join(str(value) for value in values) or "none"
