"""`scute`: the command and its subcommands. Imports nothing heavy, so that `scute --help` is quick."""

from typing import Annotated

import typer

from scute import __version__
from scute.cli import calibrate, check, compile, convert, env, inspect, methods, predict, refusals, tune, verify

app = typer.Typer(
    name="scute",
    epilog="Exit codes: 0 done, 1 refused, incompatible or above a bound, 2 wrong usage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"scute {__version__}")
        raise typer.Exit


@app.callback()
def scute(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look at PEFT adapters, convert and verify them, and look at the vLLM that is to serve them."""


app.command("inspect")(inspect.inspect)
app.command("compile")(compile.compile_)
app.command("convert")(convert.convert)
app.command("methods")(methods.methods)
app.command("refusals")(refusals.refusals)
app.command("check")(check.check)
app.command("env")(env.env)
app.command("tune")(tune.tune)
app.command("verify")(verify.verify)
app.command("predict")(predict.predict)
app.command("calibrate")(calibrate.calibrate)


if __name__ == "__main__":
    app()
