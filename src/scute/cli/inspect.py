"""`scute inspect`: what an adapter folder compiles to on a base model, or why it is refused."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scute.cli.base import base_model
from scute.cli.output import print_json, print_table
from scute.errors import Refusal

if TYPE_CHECKING:
    from scute.admission.description import Description


def inspect(
    folder: Annotated[Path, typer.Argument(help="The folder that PEFT's save_pretrained wrote.")],
    base: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The base model's folder; its config.json is enough.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile an adapter for a base model and say what it is made of, or why it is refused.

    Reads the base model's configuration, not its weights. The limits of an engine are not applied: the last line
    says what the engine has to be started with.
    """
    from scute.admission import compile_adapter
    from scute.admission.description import describe

    known = base_model(base)
    try:
        found = describe(compile_adapter(folder, known))
    except Refusal as refusal:
        _print_refusal(refusal, json)
        raise typer.Exit(1) from refusal
    if json:
        print_json(_as_json(found))
    else:
        _print_text(found)


def _print_refusal(refusal: Refusal, json: bool) -> None:
    if json:
        print_json({"served": False, "code": refusal.code, "sentence": refusal.sentence})
    else:
        typer.echo(f"refused: {refusal.code}\n{refusal.sentence}")


def _as_json(found: "Description") -> dict[str, Any]:
    return {"served": True, **asdict(found), "live_slots": found.live_slots, "engine": _engine_needs(found)}


def _print_text(found: "Description") -> None:
    lines = {
        "method": found.method,
        "projections": str(found.num_projections),
        "ranks": _listed(found.ranks),
        "shared ranks": _listed(found.shared_ranks),
        "blocks of R": _listed(found.rotation_widths),
        "live slots": _listed(found.live_slots),
        "bytes owned": f"{found.owned_bytes:,}",
        "bytes shared": f"{found.shared_bytes:,}",
        "engine": _listed([f"{name} >= {least}" for name, least in _engine_needs(found).items()]),
    }
    for name, value in lines.items():
        typer.echo(f"{name:13} {value}")
    if found.slots:
        print_table(
            ("slot", "projections", "becomes", "because"),
            [
                (use.slot, str(use.num_projections), f"part of {use.into}" if use.into else "live", use.reason)
                for use in found.slots
            ],
        )


def _engine_needs(found: "Description") -> dict[str, int]:
    """The least values of vLLM's flag and Scute's options that admit the adapter; without those it does not need."""
    needs = {
        "--max-lora-rank": max(found.ranks, default=0),
        "shared_rank": max(found.shared_ranks, default=0),
        "rotation_width": max(found.rotation_widths, default=0),
    }
    return {name: least for name, least in needs.items() if least}


def _listed(values: Any) -> str:
    return ", ".join(str(value) for value in values) or "none"
