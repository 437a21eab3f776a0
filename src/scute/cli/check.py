"""`scute check`: whether the installed vLLM is one that Scute fits."""

from typing import Annotated

import typer

from scute import __version__
from scute.cli.output import print_json
from scute.errors import Incompatible


def check(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Compare the installed vLLM with what Scute relies on: its version, and every symbol that Scute uses."""
    from scute.engine import upstream

    version, problem = None, None
    try:
        version = upstream.vllm_version()
        upstream.check_version()
        upstream.check_signatures()
        upstream.check_uses()
    except Incompatible as error:
        problem = str(error)
    if json:
        print_json({"scute": __version__, "vllm": version, "fits": problem is None, "problem": problem})
    else:
        fits = f"fits: {len(upstream.SIGNATURES)} symbols are there with the parameters that Scute expects"
        typer.echo(f"Scute {__version__}, vLLM {version or 'absent'}\n{problem or fits}")
    if problem is not None:
        raise typer.Exit(1)
