"""`scute tune`: finds block sizes of the kernels for this GPU and this base model, and keeps them for the engine."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scute.cli.base import numbers
from scute.cli.output import print_json, print_table, progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scute.costs import Device
    from scute.tuning.search import Settings
    from scute.tuning.table import Entry

PROCESSES = 8


def tune(
    base: Annotated[Path, typer.Option(help="Folder with the config.json of the base model.", exists=True)],
    folder: Annotated[
        Path | None, typer.Option(help="Where to keep the table; by default, in the user's cache.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Rows of the batches to tune for.")] = "64,8192",
    rank: Annotated[
        list[str] | None, typer.Option("--rank", "--ranks", help="Of LoRA and DoRA; 16,64 if none.")
    ] = None,
    tenants: Annotated[int, typer.Option(help="Adapters in a batch.", min=1)] = 20,
    shared_rank: Annotated[int, typer.Option(help="Rank of VeRA adapters; 0 for none.", min=0)] = 256,
    rotation_width: Annotated[int, typer.Option(help="Block width of OFT adapters; 0 for none.", min=0)] = 32,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "bfloat16",
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that the base model is cut over.", min=1)] = 1,
    seconds: Annotated[float, typer.Option(help="Stop after about this long.", min=1)] = 600.0,
    processes: Annotated[int, typer.Option(help="Processes that compile.", min=0)] = PROCESSES,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Search block sizes for this GPU. Each candidate is checked against float64, then timed with a cold L2 cache."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or the check for a GPU would forbid forking
    import torch

    from scute.tuning import table
    from scute.tuning.search import Settings
    from scute.tuning.shapes import read_shapes

    try:
        shapes = read_shapes(base, tensor_parallel_size)
        settings = Settings(
            tokens=numbers([tokens], "--tokens"),
            ranks=numbers(rank or ["16,64"], "--rank"),
            tenants=tenants,
            shared_rank=shared_rank,
            rotation_width=rotation_width,
            dtype=_dtype(dtype),
            seconds=seconds,
            processes=processes,
        )
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if not torch.cuda.is_available():
        typer.echo("There is no CUDA GPU here to tune for.", err=True)
        raise typer.Exit(1)
    device = torch.cuda.get_device_name()
    entries, skipped = _search(settings, shapes, _figures(device))
    provenance = f"scute tune for {base.name} in {dtype}, with torch {torch.__version__}"
    try:
        path = table.write(folder, device, entries, provenance)
    except OSError as error:
        typer.echo(f"The table cannot be kept: {error}. --folder names another folder for it.", err=True)
        raise typer.Exit(1) from error
    if json:
        print_json({"device": device, "file": str(path), "entries": [_as_dict(e) for e in entries], "skipped": skipped})
        return
    print_entries(entries)
    typer.echo(f"{device}: {len(entries)} entries in {path}")
    if skipped:
        typer.echo(f"Not tuned, for want of time or of candidates: {'; '.join(skipped)}")


def print_entries(entries: "Sequence[Entry]") -> None:
    def cells(entry: "Entry") -> tuple[str, ...]:
        sizes = " ".join(f"{name}={value}" for name, value in entry.blocks.items())
        asked = " ".join(f"{name}={value}" for name, value in entry.arguments.items())
        floor = "-" if entry.floor_us is None else f"{entry.floor_us:.1f}"
        times = floor, f"{entry.rule_us:.1f}", f"{entry.best_us:.1f}", f"{entry.ratio:.2f}"
        return entry.rule.removesuffix("_blocks"), asked, *times, str(entry.tried), sizes

    print_table(
        ("rule", "asked for", "floor, us", "rule, us", "best, us", "ratio", "tried", "sizes"), map(cells, entries)
    )


def _figures(device: str) -> "Device | None":
    """Of the byte model, if they are known: `scute calibrate` measures them."""
    from scute.costs import UnknownFigure, find_device

    try:
        found = find_device(device)
        return found if found.bytes_per_second and found.launch_seconds else None
    except (ValueError, UnknownFigure):
        return None


def _search(settings: "Settings", shapes: "Sequence[Any]", figures: "Device | None") -> "tuple[list[Entry], list[str]]":
    import torch

    from scute.tuning.search import Search

    told, done, total = "", 0, 0
    with progress_bar() as update:

        def progress(doing: str = "", steps: int = 0, more: int = 0) -> None:
            nonlocal told, done, total
            told, done, total = doing or told, done + steps, total + more
            update(told, done, total)

        search = Search(settings, torch.device("cuda"), progress, figures)
        return search.run(shapes), search.skipped


def _as_dict(entry: "Entry") -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(entry)


def _dtype(name: str) -> Any:
    import torch

    if name not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"{name} is not float16, bfloat16 or float32")
    return getattr(torch, name)
