"""`scute convert`: an adapter as a plain LoRA, for engines that serve nothing else, and what that loses."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scute.cli.base import base_model, torch_device
from scute.cli.output import counted, finite, print_json, print_refusal, print_table, progress_bar
from scute.errors import Refusal

if TYPE_CHECKING:
    from scute.conversion import Conversion


SHOWN = 10
"""Projections that the text shows; JSON has all."""


class Fit(StrEnum):
    """The methods of `scute.conversion.Method`, which is not imported before the command runs."""

    SVD = "svd"
    ASVD = "asvd"
    DISTILL = "distill"


def convert(
    folder: Annotated[Path, typer.Argument(help="The folder that PEFT's save_pretrained wrote.")],
    out: Annotated[Path, typer.Argument(help="The LoRA folder to write.")],
    base: Annotated[Path, typer.Option(exists=True, file_okay=False, help="The base model's folder, with weights.")],
    rank: Annotated[int, typer.Option(min=1, help="Largest rank of the LoRA.")],
    method: Annotated[Fit, typer.Option(help="How to fit what has no exact LoRA of the rank.")] = Fit.SVD,
    data: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text or JSONL; asvd and distill are fitted on it.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Sequences of the data to use.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps of distillation.")] = 200,
    learning_rate: Annotated[float, typer.Option(min=0, help="Of the first step of distillation.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Of the order of the data in distillation.")] = 0,
    device: Annotated[
        str, typer.Option("--device", "--gpu", help="Where SVDs and the model run: cpu, cuda, cuda:1, auto.")
    ] = "cpu",
    measure: Annotated[bool, typer.Option(help="Measure error and effect; this loads the base model.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an adapter folder that is in the way.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Convert an adapter to LoRA, and say what is lost. LoRA, and VeRA at its own rank, convert exactly.

    The error is that of log-probabilities against the adapter itself, as a share of the adapter's effect. A
    distillation that was stopped goes on when it is started again.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from scute.conversion import Method, Settings, Training
    from scute.conversion import convert as run

    training = Training(steps=steps, learning_rate=learning_rate, seed=seed)
    settings = Settings(rank, Method(method), data, limit, training, measure, str(torch_device(device)), force)
    disable_progress_bar()  # it would draw over ours
    try:
        with progress_bar() as progress:
            done = run(folder, out, base_model(base), base, settings, progress)
    except Refusal as refusal:
        print_refusal(refusal, done="converted", json=json)
        raise typer.Exit(1) from refusal
    except torch.OutOfMemoryError as error:
        typer.echo(f"{device} has too little memory: {error}. Try --device cpu, or --no-measure.", err=True)
        raise typer.Exit(1) from error
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    print_json(_as_json(done, out)) if json else _print_text(done, out)


def _as_json(done: "Conversion", out: Path) -> dict[str, Any]:
    agreed = done.agreement
    return {
        "converted": True,
        "folder": str(out),
        "source": done.source,
        "left_out": done.left_out,
        "measured": agreed and {"effect": agreed.effect, "error": agreed.error, "ratio": finite(agreed.ratio)},
        "measured_on": done.measured_on,
        "notes": done.notes,
        "layers": [
            {"module": layer.module, "route": layer.route, "rank": layer.rank, "left_out": layer.left_out}
            for layer in done.layers
        ],
    }


def _print_text(done: "Conversion", out: Path) -> None:
    fitted = sorted((layer for layer in done.layers if layer.route != "exact"), key=lambda layer: -layer.left_out)
    if fitted:
        print_table(
            ("projection, worst first", "route", "rank", "left out"),
            [(each.module, each.route, str(each.rank), f"{100 * each.left_out:.4f} %") for each in fitted[:SHOWN]],
        )
    typer.echo(f"{done.source} as LoRA in {out}")
    exact = f"exact on {len(done.layers) - len(fitted)} of {counted(len(done.layers), 'projection')}"
    typer.echo(exact if len(fitted) <= SHOWN else f"{exact}; the table has the worst {SHOWN} of the others, --json all")
    typer.echo(f"left out of the squared norm of all updates: {100 * done.left_out:.4f} %")
    if done.agreement is not None:
        agreed = done.agreement
        typer.echo(f"error / effect: {100 * agreed.ratio:.4f} % of {agreed.effect:.4f} nats, on {done.measured_on}")
    for note in done.notes:
        typer.echo(note)
