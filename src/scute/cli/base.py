"""The base model that a subcommand is given: its folder, read without its weights."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from scute.admission import BaseModel


def base_model(folder: Path) -> "BaseModel":
    """Raises BadParameter where transformers cannot make the folder's model."""
    import torch
    from transformers import AutoConfig

    from scute.admission import BaseModel

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return BaseModel.from_config(config, getattr(config, "dtype", None) or torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise typer.BadParameter(
            f"transformers cannot build the model of {folder}: {error}", param_hint="--base"
        ) from (error)
