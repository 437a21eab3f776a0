"""`scute inspect`: what adapter folders compile to on a base model, or every reason why they are refused."""

from pathlib import Path
from typing import Annotated, Any

import typer

from scute.cli.base import base_model
from scute.cli.findings import as_json, print_one
from scute.cli.output import print_json
from scute.cli.overview import as_row, print_many


def inspect(
    folders: Annotated[
        list[Path], typer.Argument(help="Adapter folders, folders that hold some, or stacks, as scute+stack:[...].")
    ],
    base: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="The base model's folder; its config.json is enough."),
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read the values too: how far from the identity it is.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON array, one object a folder.")] = False,
) -> None:
    """Say what adapters are made of on a base model, or all that is wrong with them.

    Reads headers only, so that a NaN is found with --deep alone. Without --base it checks what the folder alone
    decides. The limits of an engine are not applied: one line says what the engine has to be started with.
    """
    from scute import costs
    from scute.admission.inspection import Base, adapters_in
    from scute.admission.stack_inspection import inspect_path

    if deep and base is None:
        raise typer.BadParameter("--deep needs --base")
    on = None if base is None else Base(base_model(base), base)
    sizes = None if on is None else costs.Base.of(on.model, on.folder.name)
    paths = list(adapters_in(folders))
    looks = (inspect_path(path, on, deep=deep) for path in paths)  # one at a time: the folders are not kept
    refused = False
    if json or paths != folders or len(paths) > 1:
        rendered: list[Any] = []
        for found in looks:
            rendered.append(as_json(found, sizes) if json else as_row(found, sizes, deep))
            refused |= bool(found.reasons)
        print_json(rendered) if json else print_many(rendered, deep)
    else:
        (found,) = looks
        print_one(found, sizes)
        refused = bool(found.reasons)
    raise typer.Exit(1 if refused else 0)
