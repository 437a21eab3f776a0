"""`scute convert`: an adapter as a plain LoRA, for engines that serve nothing else, and what that loses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scute.cli.base import base_model
from scute.cli.output import finite, print_json, print_table
from scute.errors import Refusal

if TYPE_CHECKING:
    from scute.conversion import Conversion


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
    seed: Annotated[int, typer.Option(help="Of the order of the data in distillation.")] = 0,
    device: Annotated[str, typer.Option(help="Where SVDs and the model run, as torch names it.")] = "cpu",
    measure: Annotated[bool, typer.Option(help="Measure error and effect; this loads the base model.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an adapter folder that is in the way.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Convert an adapter to LoRA, and say what is lost. LoRA, and VeRA at its own rank, convert exactly.

    The error is that of log-probabilities against the adapter itself, as a share of the adapter's effect. A
    distillation that was stopped goes on when it is started again.
    """
    from scute.conversion import Method, Settings, Training
    from scute.conversion import convert as run

    training = Training(steps=steps, learning_rate=learning_rate, seed=seed)
    settings = Settings(rank, Method(method), data, limit, training, measure, device, force)
    try:
        with _progress() as progress:
            done = run(folder, out, base_model(base), base, settings, progress)
    except Refusal as refusal:
        said = {"converted": False, "code": refusal.code, "sentence": refusal.sentence}
        print_json(said) if json else typer.echo(f"refused: {refusal.code}\n{refusal.sentence}")
        raise typer.Exit(1) from refusal
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
    rows = [(layer.module, layer.route, str(layer.rank), f"{100 * layer.left_out:.4f} %") for layer in done.layers]
    print_table(("projection", "route", "rank", "left out"), rows)
    typer.echo(f"{done.source} as LoRA in {out}")
    typer.echo(f"left out of the squared norm of all updates: {100 * done.left_out:.4f} %")
    if done.agreement is not None:
        agreed = done.agreement
        typer.echo(f"error / effect: {100 * agreed.ratio:.4f} % of {agreed.effect:.4f} nats, on {done.measured_on}")
    for note in done.notes:
        typer.echo(note)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    columns = TimeElapsedColumn(), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda doing, steps, total: bar.update(task, description=doing, completed=steps, total=total)
