"""Finds a refusal again in the text that an error becomes on its way between processes."""

import re

from scute.errors import Code, Refusal

_REFUSAL = re.compile(
    r"\[scute:(?P<code>[a-z_.]+)\] (?P<sentence>.*?)(?:', please check the stack trace.*)?$", re.DOTALL
)


def find_refusal(text: str) -> Refusal | None:
    """The refusal that a message from another process carries, if it does."""
    match = _REFUSAL.search(text)
    if match is None or match["code"] not in list(Code):
        return None
    return Refusal(Code(match["code"]), match["sentence"])
