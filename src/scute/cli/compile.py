"""`scute compile`: an adapter folder, or a stack of them, to its normal form on disk."""

from pathlib import Path
from typing import Annotated

import typer

from scute.cli.base import base_model
from scute.cli.output import print_json, print_refusal
from scute.errors import Refusal


def compile_(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="A folder that PEFT's save_pretrained wrote; several are a stack."),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    base: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The base model's folder; its config.json is enough.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace a compiled folder that is there.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the normal form of an adapter as a folder, which the engine serves as it serves the adapter itself.

    Several adapters are applied in the order given, each to what the ones before it make of the model.
    """
    from scute.admission import compile_folder

    try:
        compile_folder(folders, out, base_model(base), base_name=base.resolve().name, force=force)
    except Refusal as refusal:
        print_refusal(refusal, done="compiled", json=json)
        raise typer.Exit(1) from refusal
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    sources = [str(folder) for folder in folders]
    if json:
        print_json({"compiled": True, "source": sources[0] if len(sources) == 1 else sources, "folder": str(out)})
    else:
        typer.echo(f"compiled {' + '.join(sources)} to {out}")
