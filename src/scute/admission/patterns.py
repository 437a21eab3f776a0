"""The regular expressions that PEFT builds out of config fields; each may fail to compile, or take for ever.

Source: `get_pattern_key` in peft/utils/other.py and `check_target_module_exists` in peft/tuners/tuners_utils.py.
"""

import re
from collections.abc import Callable
from typing import Any

import regex

from scute.errors import Code, Refusal

SECONDS = 1.0
"""How long a config's expression may look at one module name."""


class Pattern:
    """An expression of Python's `re`, matched within a time: a config must not hold up the engine."""

    def __init__(self, pattern: str) -> None:
        """Raises re.error if `re`, as PEFT uses it, cannot compile the pattern."""
        re.compile(pattern)
        try:
            self._compiled = regex.compile(pattern)
        except regex.error as error:
            raise re.error(str(error)) from error

    def fullmatch(self, name: str) -> Any:
        """The match of the whole name, or None. Refuses CONFIG_INVALID if it takes too long."""
        return self._bounded(self._compiled.fullmatch, name)

    def match(self, name: str) -> Any:
        """The match at the start of the name, or None. Refuses CONFIG_INVALID if it takes too long."""
        return self._bounded(self._compiled.match, name)

    def _bounded(self, match: Callable[..., Any], name: str) -> Any:
        try:
            return match(name, timeout=SECONDS)
        except TimeoutError as error:
            raise Refusal(
                Code.CONFIG_INVALID,
                f"adapter_config.json: the expression {self._compiled.pattern!r} takes more than {SECONDS:.0f} s on "
                f"{name}; write it without nested repetition.",
            ) from error


def whole_name(pattern: str) -> Pattern:
    """target_modules or exclude_modules as a string; for `fullmatch`."""
    return Pattern(pattern)


def end_of_name(key: str) -> Pattern:
    """A key of rank_pattern or alpha_pattern; for `match`."""
    return Pattern(rf"(.*\.)?({key})$")


def layer_index(container: str | None) -> Pattern:
    """The group "idx" is the number behind the container of the layers, or behind the first name; for `match`."""
    before = r".*?\.[^.]*" if container is None else rf"(?:^|.*?\.){container}"
    return Pattern(rf"{before}\.(?P<idx>\d+)\.")
