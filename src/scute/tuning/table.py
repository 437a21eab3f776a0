"""What a search found, and the file that `scute.kernels.sizes` looks it up in."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scute.kernels.sizes import Override, file_of, user_folder

Arguments = Mapping[str, int | tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Entry:
    """An override of a rule (`Override` has the first three), and how it was found.

    rule_us, best_us: microseconds of the adapter work of one layer, summed over the problems, with the rule's sizes
    and with these; ratio: the mean over the problems. tried: candidates that were timed; wrong: those whose result was
    not the truth. floor_us: what bytes and launches take, where the GPU's figures are known.
    """

    rule: str
    arguments: Arguments
    blocks: dict[str, int]
    problems: list[str]
    rule_us: float
    best_us: float
    ratio: float
    tried: int
    wrong: int
    floor_us: float | None = None

    @property
    def override(self) -> Override:
        return Override(self.rule, self.arguments, self.blocks)


def write(folder: Path | None, device: str, entries: Iterable[Entry], provenance: str) -> Path:
    """Add entries to the table of a GPU, in the user's folder by default; returns the file.

    An entry of the same rule, arguments and fields is replaced. The file is written whole, then renamed.
    """
    path = file_of(folder or user_folder(), device)
    found = {_key(entry): entry for entry in (*_usable(path, device), *map(asdict, entries))}
    # Of two that match, the later wins, so that should be the one that asks for more.
    ordered = sorted(found.values(), key=lambda entry: len(entry["arguments"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"device": device, "provenance": provenance, "entries": ordered}, indent=1) + "\n")
    new.replace(path)
    return path


def _usable(path: Path, device: str) -> list[dict[str, Any]]:
    """Entries of the file that there is: one that the kernels would not accept would spoil the others."""
    kept = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        data = json.loads(path.read_text())
        for entry in data["entries"] if data["device"] == device else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                Override.parse(entry)
                kept.append(entry)
    return kept


def _key(entry: Mapping[str, Any]) -> str:
    return json.dumps([entry["rule"], entry["arguments"], sorted(entry["blocks"])], sort_keys=True)
