"""`scute env`: what to attach to a bug report."""

import json as json_module
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scute.cli.output import print_json
from scute.errors import Incompatible

if TYPE_CHECKING:
    from scute.engine.environment import Fit


def env(
    additional_config: Annotated[
        str, typer.Option(help="What vLLM is started with, to see the options that follow from it.")
    ] = "{}",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print versions, options, environment variables, and the state of every vLLM symbol that Scute uses or replaces.

    Of the environment, only variables that change what is served are printed, and none that holds a key.
    """
    from scute.engine.environment import block_sizes, fit, plugins, variables
    from scute.verify.versions import versions

    options = _options(additional_config)
    found = {
        "versions": versions(),
        "plugins": plugins(),
        "options": options,
        "environment": variables(os.environ),
        "block_sizes": block_sizes(),
    }
    checked = fit(os.environ)
    if json:
        symbols = [asdict(symbol) for symbol in checked.symbols]
        print_json({**found, "fits": checked.problem is None, "problem": checked.problem, "symbols": symbols})
        return
    for heading, value in found.items():
        typer.echo(heading.replace("_", " "))
        for name, each in value.items() if isinstance(value, dict) else [(value, "")]:
            typer.echo(f"  {name:32} {'not set' if each is None else each}".rstrip())
    _print_symbols(checked)


def _options(additional_config: str) -> dict[str, Any]:
    """With the values that are left out. Raises BadParameter."""
    from scute.engine.options import Options

    try:
        return Options.parse(json_module.loads(additional_config)).model_dump()
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"it is no JSON: {error}", param_hint="--additional-config") from error
    except Incompatible as error:
        raise typer.BadParameter(str(error), param_hint="--additional-config") from error


def _print_symbols(checked: "Fit") -> None:
    typer.echo("symbols of vLLM that Scute replaces")
    for symbol in checked.symbols:
        if symbol.check == "binding":
            typer.echo(f"  {symbol.name}: {'replaced' if symbol.problem is None else 'NOT replaced'}")
    relied = [symbol for symbol in checked.symbols if symbol.check != "binding"]
    wrong = [symbol.problem for symbol in relied if symbol.problem is not None]
    typer.echo(f"symbols of vLLM that Scute relies on\n  {len(relied) - len(wrong)} of {len(relied)} are as expected")
    for problem in wrong:
        typer.echo(f"  {problem}")
    typer.echo("Scute fits this vLLM." if checked.problem is None else f"Scute would not start:\n{checked.problem}")
