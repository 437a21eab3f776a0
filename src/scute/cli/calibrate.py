"""`scute calibrate`: measures the three constants of the byte model on this device, and keeps them for predictions."""

from typing import TYPE_CHECKING, Annotated

import typer

from scute.cli.base import torch_device
from scute.cli.output import print_json, progress_bar

if TYPE_CHECKING:
    import torch

    from scute.costs import Device


def calibrate(
    device: Annotated[str, typer.Option("--device", "--gpu", help="auto, cuda, cuda:1 and so on, or cpu.")] = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="About how long to measure.")] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure bandwidth, bandwidth within L2 and the cost of a launch. `scute predict` uses them from then on.

    On a CPU these are the bandwidth of memory and the cost of a small operator. They are kept by the device's name in
    scute/devices in $XDG_CACHE_HOME or ~/.cache, and go before those that the package has; remove the file there to
    forget them.
    """
    from dataclasses import asdict

    from scute.costs.calibration import store

    measured = _measure(torch_device(device), seconds)
    try:
        found, path = store(measured)
    except OSError as error:
        typer.echo(f"The figures cannot be kept: {error}. $XDG_CACHE_HOME names another folder for them.", err=True)
        raise typer.Exit(1) from error
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


def _measure(device: "torch.device", seconds: float) -> "Device":
    import torch

    from scute.costs.calibration import Calibration, describe_device
    from scute.tuning.timing import Clock

    if device.type == "cuda":
        torch.cuda.set_device(device)  # events are of the current device
    with progress_bar() as progress:
        return Calibration(Clock(device), seconds, progress).run(describe_device(device))
