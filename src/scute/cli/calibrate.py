"""`scute calibrate`: measures the three constants of the byte model on this device, and keeps them for predictions."""

from typing import TYPE_CHECKING, Annotated

import typer

from scute.cli.output import print_json

if TYPE_CHECKING:
    import torch

    from scute.costs import Device


def calibrate(
    gpu: Annotated[str, typer.Option(help="auto, cuda, cuda:1 and so on, or cpu.")] = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="About how long to measure.")] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure bandwidth, bandwidth within L2 and the cost of a launch. `scute predict` uses them from then on.

    On a CPU these are the bandwidth of memory and the cost of a small operator.
    """
    from dataclasses import asdict

    from scute.costs.calibration import store

    device = _device(gpu)
    found = _measure(device, seconds)
    path = store(found)
    if json:
        print_json({**asdict(found), "file": str(path)})
        return
    figures = {
        "bandwidth": (found.bandwidth_gb_s, "GB/s"),
        "within L2": (found.l2_bandwidth_gb_s, "GB/s"),
        "launch": (found.launch_us, "us"),
    }
    typer.echo(found.name)
    for name, (value, unit) in figures.items():
        typer.echo(f"{name:10} " + ("not measured" if value is None else f"{value:,.2f} {unit}"))
    typer.echo(f"kept in {path}")


def _device(name: str) -> "torch.device":
    """Exits with 1 where there is no such GPU. Raises BadParameter for another kind of device."""
    import torch

    try:
        found = torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError as error:
        raise typer.BadParameter(f"{name} is not auto, cuda, cuda:N or cpu", param_hint="--gpu") from error
    if found.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{name} is not auto, cuda, cuda:N or cpu", param_hint="--gpu")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        typer.echo(f"There is no GPU {name} here.", err=True)
        raise typer.Exit(1)
    if found.type == "cuda":
        found = torch.device("cuda", found.index or 0)
        torch.cuda.set_device(found)  # events are of the current device; it takes no device without an index
    return found


def _measure(device: "torch.device", seconds: float) -> "Device":
    """With a bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from scute.costs.calibration import Calibration, describe_device
    from scute.tuning.timing import Clock

    described = describe_device(device)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=None)

        def progress(doing: str, left: int) -> None:
            total = bar.tasks[task].total or left
            bar.update(task, description=doing, total=total, completed=total - left)

        found = Calibration(Clock(device), seconds, progress).run(described)
        bar.update(task, description="done", completed=bar.tasks[task].total)
    return found
