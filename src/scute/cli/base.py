"""The base model that a subcommand is given: its folder, read without its weights."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from scute.admission import BaseModel


def base_model(folder: Path) -> "BaseModel":
    """Raises BadParameter where transformers cannot make the folder's model."""
    from scute.admission.base_folder import read_base

    try:
        return read_base(folder)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--base") from error
