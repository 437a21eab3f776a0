"""`scute verify`: adapters in a vLLM engine against the PEFT library, for a bug report."""

import json as jsons
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scute.cli.base import base_model
from scute.cli.output import finite, print_json, print_refusal, print_table
from scute.errors import Refusal

if TYPE_CHECKING:
    from scute.verify.verify import Verdict, Verification


class Dtype(StrEnum):
    """What vLLM takes for --dtype."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


SHOWN = 10
"""Modules of an adapter that the text shows; JSON has all."""


def verify(
    folders: Annotated[list[Path], typer.Argument(help="Adapter folders, or folders that hold adapter folders.")],
    base: Annotated[Path, typer.Option(exists=True, file_okay=False, help="The base model's folder, with weights.")],
    bound: Annotated[float, typer.Option(min=0, help="Largest error / effect, in percent.")] = 2.0,
    dtype: Annotated[Dtype, typer.Option(help="As vLLM's --dtype.")] = Dtype.AUTO,
    engine: Annotated[str, typer.Option(help="Further arguments of vllm.LLM, as a JSON object.")] = "{}",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Serve adapters in vLLM and run them in the PEFT library in float32, and say how far the two are apart.

    For an adapter above the bound, every projection is compared too: the normal form in torch against PEFT's layer, on
    the same inputs. If those agree, it is the engine that errs. Exits with 1 if an adapter is refused or above the
    bound.
    """
    if find_spec("peft") is None:
        typer.echo("scute verify needs the PEFT library, which is not installed: pip install peft==0.21.2", err=True)
        raise typer.Exit(2)
    from scute.admission.inspection import adapters_in
    from scute.verify.verify import verify as run
    from scute.verify.versions import versions

    options = {"dtype": str(dtype), **_arguments(engine)}
    try:
        paths = list(adapters_in(folders))
        done = run(paths, base_model(base), base, bound / 100, options, lambda step: typer.echo(step, err=True))
    except Refusal as refusal:
        print_refusal(refusal, done="verified", json=json)
        raise typer.Exit(1) from refusal
    except RuntimeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    found, wrong = versions() | {"dtype": str(options["dtype"])}, [v for v in done.verdicts if _is_above(v, bound)]
    print_json(_as_json(done, found, bound)) if json else _print_text(done, found, bound)
    raise typer.Exit(1 if wrong else 0)


def _arguments(text: str) -> dict[str, Any]:
    """Raises BadParameter for what is no JSON object, and for what vLLM has no argument for."""
    try:
        found = jsons.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not JSON: {error}", param_hint="--engine") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f'{text!r} is not a JSON object, as {{"max_model_len": 64}}', param_hint="--engine")
    if found:
        from scute.engine.offline import check_arguments  # imports vLLM, which only the engine's process needs else

        try:
            check_arguments(found)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--engine") from error
    return found


def _is_above(verdict: "Verdict", bound: float) -> bool:
    return not 100 * verdict.agreement.ratio <= bound


def _as_json(done: "Verification", versions: dict[str, str], bound: float) -> dict[str, Any]:
    adapters = [
        {
            "folder": verdict.folder,
            "method": verdict.method,
            "effect": verdict.agreement.effect,
            "error": verdict.agreement.error,
            "ratio": finite(verdict.agreement.ratio),
            "base_ratio": finite(done.base_ratio(verdict)),
            "above_bound": _is_above(verdict, bound),
            "modules": [{"module": m.module, "ratio": finite(m.ratio)} for m in verdict.modules],
        }
        for verdict in done.verdicts
    ]
    told = {"verified": True, "versions": versions, "bound": bound / 100, "base_error": done.base_error}
    return {**told, "adapters": adapters}


def _print_text(done: "Verification", versions: dict[str, str], bound: float) -> None:
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
                "above" if _is_above(verdict, bound) else "holds",
            )
            for verdict in done.verdicts
        ],
    )
    typer.echo(f"rows without an adapter: {done.base_error:.6f} nats a token from the base model in float32")
    if versions["dtype"] != "float32" and any(_is_above(verdict, bound) for verdict in done.verdicts):
        typer.echo(
            f"dtype {versions['dtype']} rounds base rows too, by the share of the effect beside each adapter: an error "
            "of about that size is the dtype's. --dtype float32 shows the adapter's own."
        )
    for verdict in (verdict for verdict in done.verdicts if verdict.modules):
        rows = [(m.module, f"{100 * m.ratio:.4f} %") for m in verdict.modules[:SHOWN]]
        print_table((f"{verdict.folder}: the normal form against PEFT's layer, worst first", "error / effect"), rows)
