"""The files that are read of an adapter's folder, or fetched of its repository, and how large they may be."""

import os
from collections.abc import Iterable
from pathlib import Path

from scute.admission.compiled.manifest import MANIFEST_FILE, WEIGHTS_FILE
from scute.admission.memory import GIB
from scute.admission.tensors import CONFIG_FILE, TENSOR_FILE
from scute.errors import Code, Refusal

KINDS = ((CONFIG_FILE, TENSOR_FILE), (MANIFEST_FILE, WEIGHTS_FILE))
"""What PEFT writes, and what `scute compile` does."""

FILES = tuple(file for kind in KINDS for file in kind)


def is_complete(folder: Path) -> bool:
    return any(all(os.path.isfile(folder / file) for file in kind) for kind in KINDS)


def sizes_of(folder: Path) -> list[int]:
    """Bytes of those that are there."""
    return [os.path.getsize(folder / file) for file in FILES if os.path.isfile(folder / file)]


def check_sizes(name: str, sizes: Iterable[int], limit_gib: float | None) -> None:
    """Raises Refusal if files of these sizes, in bytes, are beyond the limit together."""
    total = sum(sizes)
    if limit_gib is not None and total > limit_gib * GIB:
        raise Refusal(
            Code.SOURCE_TOO_LARGE,
            f"the files of {name!r} have {total / GIB:.3g} GiB, and adapter_file_gib is {limit_gib:g}; raise it in "
            "additional_config['scute'], or train a smaller adapter.",
        )
