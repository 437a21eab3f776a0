"""`python -m scute.demo [--json]`."""

import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils.logging import disable_progress_bar

from scute.demo.compare import STEPS, compare
from scute.demo.report import Row, to_json, to_table


def demo(
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    cache: Annotated[Path, typer.Option(help="Where the base model and the adapters go.")] = Path(".cache"),
) -> None:
    """Serve adapters of every method in one batch on the CPU, and hold each against the PEFT library.

    Exits with 1 if any row is out of its bound.
    """
    _be_quiet()
    rows = _with_progress(cache)
    if json:
        print(to_json(rows))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(to_table(rows))
        print(f"Look at one:  scute inspect {cache}/adapters/dora --base {cache}/smollm2")
    wrong = [row.name for row in rows if not row.within_bound]
    if wrong:
        print(f"{len(wrong)} of {len(rows)} rows out of bound: {', '.join(wrong)}", file=sys.stderr)
    raise typer.Exit(code=1 if wrong else 0)


def _with_progress(cache: Path) -> list[Row]:
    columns = TimeElapsedColumn(), BarColumn(bar_width=20), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=STEPS + 1)
        rows = compare(cache, lambda step: progress.update(task, description=step, advance=1))
        progress.update(task, description="done", advance=1)
    return rows


def _be_quiet() -> None:
    """Leave the screen to the progress bar."""
    disable_progress_bar()
    # PEFT warns that a VeRA pair may be redrawn differently elsewhere; here it is redrawn where it was drawn.
    warnings.filterwarnings("ignore", category=UserWarning, module="peft")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(demo)
    app()
