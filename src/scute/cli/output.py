"""What the subcommands print with: tables and refusals for people, JSON for programs, a bar for both."""

import json as jsons
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from scute.errors import Refusal

PIPE_WIDTH = 120


def finite(value: float) -> float | None:
    """For JSON, which has neither infinity nor NaN."""
    return value if math.isfinite(value) else None


def counted(number: int, noun: str) -> str:
    """As "1 adapter" and "2 adapters"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_json(value: Any) -> None:
    typer.echo(jsons.dumps(value, indent=2, ensure_ascii=False))


def print_refusal(refusal: Refusal, *, done: str, json: bool) -> None:
    """A refusal that ends a command, on standard output. done: the field of the JSON that is false then."""
    if json:
        print_json({done: False, "code": refusal.code, "sentence": refusal.sentence})
    else:
        print_reason(refusal)


def print_reason(refusal: Refusal, word: str = "refused") -> None:
    typer.echo(f"{word}: {refusal.code}\n{refusal.sentence}")


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table as wide as the terminal, or PIPE_WIDTH columns where there is none; cells are plain text."""
    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, markup=False).print(table)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error. What it yields takes what comes next, the steps that are done, and all of them."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TimeElapsedColumn(), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total)
