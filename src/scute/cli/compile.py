"""`scute compile`: an adapter folder to its normal form on disk."""

from pathlib import Path
from typing import Annotated

import typer

from scute.cli.base import base_model
from scute.cli.output import print_json, print_refusal
from scute.errors import Refusal


def compile_(
    folder: Annotated[Path, typer.Argument(help="The folder that PEFT's save_pretrained wrote.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    base: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The base model's folder; its config.json is enough.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace a compiled folder that is there.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the normal form of an adapter as a folder, which the engine serves as it serves the adapter itself."""
    from scute.admission import compile_folder

    try:
        compile_folder(folder, out, base_model(base), base_name=base.resolve().name, force=force)
    except Refusal as refusal:
        print_refusal(refusal, done="compiled", json=json)
        raise typer.Exit(1) from refusal
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if json:
        print_json({"compiled": True, "source": str(folder), "folder": str(out)})
    else:
        typer.echo(f"compiled {folder} to {out}")
