"""What several subcommands are given: the folder of a base model, a device, ranks."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch

    from scute.admission import BaseModel


def base_model(folder: Path) -> "BaseModel":
    """Read without its weights. Raises BadParameter where transformers cannot make the folder's model."""
    from scute.admission.base_folder import read_base

    try:
        return read_base(folder)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--base") from error


def torch_device(name: str) -> "torch.device":
    """The device of `--device`; "auto" is a GPU if there is one.

    Raises BadParameter for what is neither a CPU nor a GPU, and exits with 1 where there is no such GPU.
    """
    import torch

    try:
        found = torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError:
        found = torch.device("meta")
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise typer.BadParameter(f"{name!r} is not auto, cuda, cuda:N or cpu", param_hint="--device")
    index = found.index or 0  # torch.cuda.set_device takes no device without one
    if index >= torch.cuda.device_count():
        typer.echo(f"There is no GPU {name} here.", err=True)
        raise typer.Exit(1)
    return torch.device("cuda", index)


def numbers(given: Iterable[str], option: str) -> tuple[int, ...]:
    """Positive numbers of an option that may be repeated and that takes lists, as 16,64. Raises BadParameter."""
    parts = [part.strip() for text in given for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts):
        raise typer.BadParameter(f"{', '.join(given)!r} is not a list of numbers, as 16,64", param_hint=option)
    return tuple(dict.fromkeys(map(int, parts)))
