"""JSON in which no key of an object is there twice: two readers may then not agree on which of them counts."""

import json
from pathlib import Path
from typing import Any

LONGEST_FILE = 16 * 2**20
"""Bytes of a config or a manifest; those of real adapters have some thousands."""


def read(path: Path) -> Any:
    """The value of a JSON file in UTF-8. Raises what `parse` does, ValueError for a file that is too long, OSError."""
    with path.open("rb") as file:
        content = file.read(LONGEST_FILE + 1)
    if len(content) > LONGEST_FILE:
        raise ValueError(f"it has more than {LONGEST_FILE} bytes")
    return parse(content.decode("utf-8"))


def parse(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for a key that an object has twice, and RecursionError."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:100]!r} is there twice")
    return result
