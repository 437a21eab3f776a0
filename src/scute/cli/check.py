"""`scute check`: whether the installed vLLM is one that Scute fits."""

import typer

from scute.errors import Incompatible


def check() -> None:
    """Compare the installed vLLM with what Scute relies on: its version, and every symbol that Scute uses."""
    from scute.engine import upstream

    try:
        version = upstream.vllm_version()
        typer.echo(f"vLLM {version}")
        upstream.check_version()
        upstream.check_signatures()
        upstream.check_uses()
    except Incompatible as error:
        typer.echo(str(error))
        raise typer.Exit(1) from error
    typer.echo(f"fits: {len(upstream.SIGNATURES)} symbols are there with the parameters that Scute expects")
