"""`scute compile`: an adapter folder to its normal form on disk."""

from pathlib import Path
from typing import Annotated

import typer

from scute.errors import Refusal


def compile_(
    folder: Annotated[Path, typer.Argument(help="The folder that PEFT's save_pretrained wrote.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    base: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The base model's folder; its config.json is enough.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace a compiled folder that is there.")] = False,
) -> None:
    """Write the normal form of an adapter as a folder, which the engine serves as it serves the adapter itself."""
    from scute.admission import compile_folder
    from scute.admission.base_folder import read_base

    try:
        compile_folder(folder, out, read_base(base), base_name=base.resolve().name, force=force)
    except Refusal as refusal:
        typer.echo(f"refused: {refusal.code}\n{refusal.sentence}")
        raise typer.Exit(1) from refusal
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"compiled {folder.name} to {out}")
