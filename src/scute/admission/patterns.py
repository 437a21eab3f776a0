"""The regular expressions that PEFT builds out of config fields; each may fail to compile, or take for ever.

`re`, as PEFT uses it, has no time limit; `regex` has one, and syntax of its own that `re` takes literally. So an
expression is compiled by both, and is made of what both read alike.
Source: `get_pattern_key` in peft/utils/other.py and `check_target_module_exists` in peft/tuners/tuners_utils.py.
"""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import regex

from scute.admission.tensors import CONFIG_FILE
from scute.errors import Code, Refusal, shown

SECONDS = 3.0
"""How long the expressions of one config may take together, to compile and to match."""
LONGEST = 10_000
"""Characters of an expression, and of one whose repetitions are written out: `regex` may write them out."""

TOKEN = re.compile(
    r"""
      \( (?: \?[:=!] | \?<[=!] | \?P<\w+> | \?i\) | (?!\?) )
    | \)
    | (?: [*+?] | \{ (?: \d+ ,? \d* | , \d* ) \} ) \?? (?!\+)
    | \\ (?: [AbBdDsSwWZ] | [ -~](?<![A-Za-z0-9]) )
    | \[ \^? \]? (?: \\[dDsSwW] | \\[ -~](?<![A-Za-z0-9]) | (?! (?P<one>[-&|~])(?P=one) ) [ -~](?<![\[\]\\]) )* \]
    | [ -~](?<![\\\[(){*+?])
    """,
    re.VERBOSE | re.ASCII,
)
"""What an expression is made of. Left out is what `re` and `regex` read differently, now or in a version 1 of sets
(flags within, classes and operations of sets, braces that repeat nothing), and what one of them gets wrong (references
to groups, atomic groups and repetitions)."""


class Expressions:
    """The expressions of one config, compiled once each: a config must not hold up the engine, however many it has."""

    def __init__(self) -> None:
        self._seconds = SECONDS
        self._compiled: dict[str, Any] = {}

    def compile(self, expression: str) -> Any:
        """What `regex` makes of it. Raises ValueError for what is none or too long; refuses CONFIG_INVALID for time."""
        if expression not in self._compiled:
            self._compiled[expression] = self._timed(expression, _compile, expression)
        return self._compiled[expression]

    def fullmatch(self, expression: str, name: str) -> Any:
        """The match of the whole name, or None. Raises what `compile` does."""
        return self._timed(expression, self.compile(expression).fullmatch, name, timeout=self._seconds)

    def match(self, expression: str, name: str) -> Any:
        """The match at the start of the name, or None. Raises what `compile` does."""
        return self._timed(expression, self.compile(expression).match, name, timeout=self._seconds)

    def _timed(self, expression: str, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What the step returns, if it is done before the time is over."""
        start = time.monotonic()
        try:
            if self._seconds > 0:
                result = step(*args, **options)
                self._seconds -= time.monotonic() - start
        except (TimeoutError, MemoryError):
            self._seconds = 0.0
        if self._seconds > 0:
            return result
        raise Refusal(
            Code.CONFIG_INVALID,
            f"{CONFIG_FILE}: its regular expressions take more than {SECONDS:.0f} s together, up to "
            f"{shown(expression)}. Write them without nested repetitions, or name modules in a list.",
        )


def end_of_name(key: str) -> str:
    """A key of rank_pattern or alpha_pattern; for `match`."""
    return rf"(.*\.)?({key})$"


def layer_index(container: str | None) -> str:
    """The group "idx" is the number behind the container of the layers, or behind the first name; for `match`."""
    before = r".*?\.[^.]*" if container is None else rf"(?:^|.*?\.){container}"
    return rf"{before}\.(?P<idx>\d+)\."


def _compile(expression: str) -> Any:
    if len(expression) > LONGEST:
        raise ValueError(f"it has {len(expression)} characters, and a regular expression at most {LONGEST}")
    tokens = list(_tokens(expression))
    try:
        re.compile(expression)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise ValueError(f"it is not a regular expression ({error})") from error
    if _written_out(tokens) > LONGEST:
        raise ValueError(f"its repetitions written out have more than {LONGEST} characters; repeat with * or +")
    try:
        return regex.compile(expression)
    except (regex.error, RecursionError) as error:
        raise ValueError(f"it is not a regular expression that can be matched in a bounded time ({error})") from error


def _tokens(expression: str) -> Iterator[str]:
    position = 0
    while position < len(expression):
        token = TOKEN.match(expression, position)
        if token is None:
            rest = shown(expression[position:])
            raise ValueError(f"from {rest} on it is no expression of characters, sets, groups and repetitions alone")
        yield token[0]
        position = token.end()


def _written_out(tokens: list[str]) -> int:
    """The characters of a valid expression whose repetitions are written out, each at its most."""
    groups, last = [0], 0
    for token in tokens:
        if token[0] in "*+?{":
            most = max([1, *map(int, re.findall(r"\d+", token))])
            groups[-1] += last * (most - 1)
            last *= most
        elif token[0] == "(" and token != "(?i)":
            groups.append(0)
        else:
            last = max(1, groups.pop()) if token == ")" else 1
            groups[-1] += last
    return groups[0]
