"""A verification as `scute verify` prints it: text, JSON."""

from typing import TYPE_CHECKING, Any

import typer

from scute.cli.output import finite, print_table

if TYPE_CHECKING:
    from scute.verify.verify import Verdict, Verification

SHOWN = 10
"""Modules of an adapter that the text shows; JSON has all."""


def is_above(verdict: "Verdict", bound: float) -> bool:
    """bound: in percent."""
    return not 100 * verdict.agreement.ratio <= bound


def as_json(done: "Verification", versions: dict[str, str], bound: float) -> dict[str, Any]:
    adapters = [
        {
            "folder": verdict.folder,
            "method": verdict.method,
            "effect": verdict.agreement.effect,
            "error": verdict.agreement.error,
            "ratio": finite(verdict.agreement.ratio),
            "base_ratio": finite(done.base_ratio(verdict)),
            "above_bound": is_above(verdict, bound),
            "modules": [{"module": m.module, "ratio": finite(m.ratio)} for m in verdict.modules],
        }
        for verdict in done.verdicts
    ]
    told = {"verified": True, "versions": versions, "bound": bound / 100, "base_error": done.base_error}
    return {**told, "adapters": adapters}


def print_text(done: "Verification", versions: dict[str, str], bound: float) -> None:
    typer.echo(", ".join(f"{name} {version}" for name, version in versions.items()))
    print_table(
        ("adapter", "method", "effect, nats", "error / effect", "base rows / effect", f"bound {bound:g} %"),
        [
            (
                verdict.folder,
                verdict.method,
                f"{verdict.agreement.effect:.4f}",
                f"{100 * verdict.agreement.ratio:.4f} %",
                f"{100 * done.base_ratio(verdict):.4f} %",
                "above" if is_above(verdict, bound) else "holds",
            )
            for verdict in done.verdicts
        ],
    )
    typer.echo(f"rows without an adapter: {done.base_error:.6f} nats a token from the base model in float32")
    if versions["dtype"] != "float32" and any(is_above(verdict, bound) for verdict in done.verdicts):
        typer.echo(
            f"dtype {versions['dtype']} rounds base rows too, by the share of the effect beside each adapter: an error "
            "of about that size is the dtype's. --dtype float32 shows the adapter's own."
        )
    for verdict in (verdict for verdict in done.verdicts if verdict.modules):
        rows = [(m.module, f"{100 * m.ratio:.4f} %") for m in verdict.modules[:SHOWN]]
        print_table((f"{verdict.folder}: the normal form against PEFT's layer, worst first", "error / effect"), rows)
