"""`scute methods`: what is served, which slots stay live, and which files are read."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from scute.cli.output import print_json, print_table


@dataclass(frozen=True, slots=True)
class Row:
    """One method: its row of Table 1, and the PEFT files that hold it (peft_type is None where PEFT has none).

    tensors: what is behind a module's name in the file; shared: whole names of tensors that belong to no module.
    """

    method: str
    owned: tuple[str, ...]
    folds: tuple[tuple[str, str], ...]
    live: tuple[str, ...]
    peft_type: str | None
    tensors: tuple[str, ...]
    shared: tuple[str, ...]


def methods(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the methods: the slots that each owns, folds and keeps live, and the tensors it is read from."""
    from scute.admission.tensors import CONFIG_FILE, PICKLE_FILE, TENSOR_FILE

    rows = tuple(table())
    if json:
        files = {"config": CONFIG_FILE, "tensors": TENSOR_FILE, "refused": PICKLE_FILE}
        print_json({"files": files, "methods": [asdict(row) for row in rows]})
        return
    print_table(("method", "owned", "folds", "live", "peft_type", "tensors"), [_cells(row) for row in rows])
    typer.echo(f"An adapter is a folder with {CONFIG_FILE} and {TENSOR_FILE}. {PICKLE_FILE} is not read.")


def table() -> Iterator[Row]:
    """Table 1 of the paper, with the variants of its methods and the formats that admission reads."""
    from scute.admission.methods.registry import METHODS
    from scute.algebra.members import table1, variants

    formats = {method.name: method for method in METHODS}
    others = list(variants())
    for row in table1():
        known = formats.get(row.method)
        files = (None, (), ()) if known is None else (known.peft_type, known.suffixes, known.shared)
        for each in (row, *(other for name, other in others if name == row.method)):
            yield Row(each.method, each.owned, each.folds, each.live, *files)


def _cells(row: Row) -> tuple[str, ...]:
    folds = ", ".join(f"{slot} into {into}" for slot, into in row.folds)
    tensors = ", ".join((*row.tensors, *row.shared)) or "no PEFT format"
    return row.method, " ".join(row.owned), folds, " ".join(row.live), row.peft_type or "", tensors
