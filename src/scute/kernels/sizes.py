"""Block sizes that were measured on this GPU, and where there are none, those of `scute.kernels.blocks`.

They are in a table, a JSON file with the name of the GPU: the user's own, from `scute tune`, else the package's.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, TypeVarTuple, cast

import torch

from scute.kernels import blocks

Asked = TypeVarTuple("Asked")
Sizes = TypeVar("Sizes")

PACKAGED = Path(__file__).parent / "tables"
RULES: Mapping[str, Callable[..., Any]] = {
    rule.__name__: rule
    for rule in (blocks.decode_blocks, blocks.prefill_blocks, blocks.rotate_blocks, blocks.gemm_blocks)
}
STEPWISE = frozenset({"tokens", "shared_rank"})
"""Arguments that change from step to step. Were a table to tell them apart, so would the sum of a row of one adapter,
and the row's bits would depend on the others of its batch."""
WITH_A_PAIR = frozenset({"expand_registers"})
"""Fields that an entry may set for some `shared_rank` beside those of the pair itself: they change no sum."""

ANY_SIZE = frozenset({"split_width", "shared_splits", "splits", "steps", "expand_registers"})
"""Fields that need be no power of two; every field that names stages is another."""

_logger = logging.getLogger(__name__)


class Override(NamedTuple):
    """What a rule is to answer instead of its own, for some of its fields.

    arguments: those that must match, by name: a value, or the least and the greatest. An argument that is not named
    may have any value.
    """

    rule: str
    arguments: Mapping[str, int | tuple[int, int]]
    blocks: Mapping[str, int]

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> "Override":
        """Raises ValueError for what no rule asks or no kernel knows, KeyError or TypeError for another format."""
        arguments = {name: tuple(v) if isinstance(v, list) else v for name, v in entry["arguments"].items()}
        override = cls(entry["rule"], arguments, dict(entry["blocks"]))
        override._check()
        return override

    def changes(self, arguments: Mapping[str, int]) -> bool:
        return all(
            arguments[name] == wanted if isinstance(wanted, int) else wanted[0] <= arguments[name] <= wanted[1]
            for name, wanted in self.arguments.items()
        )

    def _check(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"there is no rule {self.rule}")
        asked = signature(RULES[self.rule])
        for name, wanted in self.arguments.items():
            numbers = wanted if isinstance(wanted, tuple) else (wanted,)
            if name not in asked.parameters or len(numbers) > 2 or not all(type(n) is int for n in numbers):
                raise ValueError(f"{self.rule} is not asked for {name} {wanted}")
        for name, value in self.blocks.items():
            if name not in asked.return_annotation._fields or type(value) is not int or value < 1:
                raise ValueError(f"{self.rule} does not answer {name} {value}")
            if name not in ANY_SIZE and not name.endswith("stages") and value & (value - 1):
                raise ValueError(f"{name} of {self.rule} has to be a power of two, not {value}")
            if not may_set(name, self.arguments):
                raise ValueError(f"{name} of {self.rule} may not depend on {', '.join(STEPWISE & {*self.arguments})}")


def may_set(field: str, arguments: Iterable[str]) -> bool:
    """Whether an entry that names these arguments leaves the order of every row's sum alone."""
    named = STEPWISE.intersection(arguments)
    return not named or (named == {"shared_rank"} and (field.startswith("shared_") or field in WITH_A_PAIR))


def overridden(overrides: Iterable[Override], rule: str, arguments: Mapping[str, int], sizes: Any) -> Any:
    """`sizes` (a named tuple, the rule's own answer) with the fields of every override that matches, in order."""
    for override in overrides:
        if override.rule == rule and override.changes(arguments):
            sizes = sizes._replace(**override.blocks)
    return sizes


def user_folder() -> Path:
    """Where tables that `scute tune` makes are kept, as the XDG specification has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "scute" / "blocks"


def file_of(folder: Path, device: str) -> Path:
    """device: the name that CUDA gives the GPU."""
    return folder / f"{re.sub('[^a-z0-9]+', '_', device.lower())}.json"


def read(path: Path, device: str) -> list[Override]:
    """The overrides of a file. Raises ValueError for one that is no table, or that of another GPU."""
    try:
        data = json.loads(path.read_text())
        if data["device"] != device:
            raise ValueError(f"it is for {data['device']}")
        return [Override.parse(entry) for entry in data["entries"]]
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no table of block sizes: {error!r}") from error


@cache
def overrides_of(device: str | None) -> tuple[Override, ...]:
    """Of the first table there is; none without a GPU, and none from a table that cannot be used."""
    for folder in (user_folder(), PACKAGED) if device is not None else ():
        path = file_of(folder, str(device))
        try:
            return tuple(read(path, str(device)))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            _logger.warning("%s is not used, block sizes follow the rules: %s", path, error)
            break
    return ()


@cache
def _device() -> str | None:
    """One for the process: the engine has one device in each."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _measured(rule: Callable[[*Asked], Sizes]) -> Callable[[*Asked], Sizes]:
    """The rule with this GPU's table before it; the same question is looked up once."""
    names = tuple(signature(rule).parameters)

    @wraps(rule)
    def answer(*arguments: *Asked) -> Sizes:
        named = dict(zip(names, cast("tuple[int, ...]", arguments), strict=True))
        return cast("Sizes", overridden(overrides_of(_device()), rule.__name__, named, rule(*arguments)))

    return cast("Callable[[*Asked], Sizes]", cache(answer))


decode_blocks = _measured(blocks.decode_blocks)
prefill_blocks = _measured(blocks.prefill_blocks)
rotate_blocks = _measured(blocks.rotate_blocks)
gemm_blocks = _measured(blocks.gemm_blocks)
