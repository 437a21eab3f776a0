"""What the subcommands print with: tables for people, JSON for programs."""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 120


def finite(value: float) -> float | None:
    """For JSON, which has neither infinity nor NaN."""
    return value if math.isfinite(value) else None


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table as wide as the terminal, or PIPE_WIDTH columns where there is none; cells are plain text."""
    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, markup=False).print(table)
