"""Where the refusals of one folder go: the first is raised, or all of them are collected."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from scute.errors import Refusal

MOST = 200
"""Reasons that are kept; a file may hold any number of tensors that nobody knows."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Reasons:
    """The refusals of one folder, in the order in which the compiler meets them.

    An engine needs the first alone, which `add` raises. With `collect` the compiler goes on, with an empty tensor in
    place of a bad one, and `found` has the reasons (at most MOST). The first of them is the one an engine raises.
    left_out: how many more there were.
    """

    def __init__(self, *, collect: bool = False) -> None:
        self.collects = collect
        self.found: list[Refusal] = []
        self.left_out = 0

    def add(self, refusal: Refusal) -> None:
        """Raise the refusal, or remember it."""
        if not self.collects:
            raise refusal
        if len(self.found) < MOST:
            self.found.append(refusal)
        else:
            self.left_out += 1

    def attempt(
        self, step: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result | None:
        """What the step returns; None if it raised a refusal, which is then remembered."""
        try:
            return step(*args, **kwargs)
        except Refusal as refusal:
            self.add(refusal)
            return None
