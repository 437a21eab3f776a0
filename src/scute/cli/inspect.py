"""`scute inspect`: what adapter folders compile to on a base model, or every reason why they are refused."""

from pathlib import Path
from typing import Annotated

import typer

from scute.cli.base import base_model
from scute.cli.findings import COLUMNS, as_json, as_row, print_one
from scute.cli.output import print_json, print_table


def inspect(
    folders: Annotated[list[Path], typer.Argument(help="Adapter folders, or folders that hold adapter folders.")],
    base: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="The base model's folder; its config.json is enough."),
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read the values too: how far from the identity it is.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what adapters are made of on a base model, or all that is wrong with them.

    Reads headers only, so that a NaN is found with --deep alone. Without --base it checks what the folder alone
    decides. The limits of an engine are not applied: one line says what the engine has to be started with.
    """
    from scute import costs
    from scute.admission.inspection import Base, adapters_in, inspect_folder

    if deep and base is None:
        raise typer.BadParameter("--deep needs --base")
    on = None if base is None else Base(base_model(base), base)
    sizes = None if on is None else costs.Base.of(on.model, on.folder.name)
    paths = list(adapters_in(folders))
    if len(paths) == 1 and paths == folders:
        found = inspect_folder(paths[0], on, deep=deep)
        if json:
            print_json(as_json(found, sizes))
        else:
            print_one(found, sizes)
        raise typer.Exit(1 if found.reasons else 0)
    render = as_json if json else as_row
    each = (inspect_folder(path, on, deep=deep) for path in paths)
    rendered = [(render(found, sizes), bool(found.reasons)) for found in each]  # small: the folders are not kept
    if json:
        print_json([told for told, _ in rendered])
    else:
        print_table(COLUMNS, [tuple(row) for row, _ in rendered])
    raise typer.Exit(1 if any(refused for _, refused in rendered) else 0)
