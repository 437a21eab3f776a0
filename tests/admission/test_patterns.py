"""Expressions of a config: read as `re` reads them or refused, in bounded time and memory."""

import time

import pytest

from scute.admission import patterns
from scute.admission.patterns import Expressions, end_of_name
from scute.errors import Code, Refusal


def test_an_expression_that_takes_too_long(monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.05)
    expressions = Expressions()
    for name in ("a" * 200, "a"):  # the time is over for the next one too
        with pytest.raises(Refusal, match="nested repetitions") as refusal:
            expressions.fullmatch("([a-z]|[a-z0-9])*[A-Z]", name)
        assert refusal.value.code is Code.CONFIG_INVALID
    assert Expressions().fullmatch("a*", "a" * 200), "the time is that of one config"


@pytest.mark.parametrize("form", ["([a-z]|[a-z0-9])*{}[A-Z]", "a{}"], ids=["to match", "to compile"])
def test_many_expressions_share_one_time(monkeypatch, form):
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    expressions, start = Expressions(), time.monotonic()
    many = (expressions.match(end_of_name(form.format(number)), "a" * 15) for number in range(100_000))
    with pytest.raises(Refusal, match="together"):
        list(many)
    assert time.monotonic() - start < 3
