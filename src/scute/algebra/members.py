"""Members that no PEFT file format describes, and the examples behind Table 1 of the paper."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scute.algebra.fold import fold, live_slots
from scute.algebra.form import Bias, Member, Owner, Rotation, SharedPair, Term


def ssf(scale: Tensor, shift: Tensor) -> Member:
    """SSF (https://arxiv.org/abs/2210.08823): y = (x W + base bias) ⊙ scale + shift; both are [out]."""
    return Member(scale=scale, bias=Bias(scaled=True, shift=shift))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of Table 1: owned and live are slot names, folds are (slot, into)."""

    method: str
    owned: tuple[str, ...]
    folds: tuple[tuple[str, str], ...]
    live: tuple[str, ...]


def table1() -> tuple[Row, ...]:
    """Table 1 of the paper, worked out by `fold` on one example member per method; AdaLoRA beside it."""
    return tuple(_row(method, member) for method, member in _examples().items())


def variants() -> Iterator[tuple[str, Row]]:
    """Rows for the formats of a method of Table 1 that are another member than its example; each with that method."""
    term = Term(torch.ones(4, 2), torch.ones(2, 4), 2.0)
    yield "LoRA", _row("rsLoRA", Member(terms=(term,)))
    diagonal = Rotation(torch.full((4, 1, 1), 2.0))
    yield "(IA)3", _row("(IA)3 on inputs that no gated projection produces", Member(rotation=diagonal))


def _row(method: str, member: Member) -> Row:
    owned: tuple[str, ...] = ("R",) if member.rotation is not None else ()
    for term in member.terms:
        owned += tuple(n for n, o in (("A", term.a_owner), ("B", term.b_owner)) if o is Owner.ADAPTER)
    folded, records = fold(member)
    return Row(method, owned, tuple((r.slot, r.into) for r in records if r.into is not None), live_slots(folded))


def _examples() -> dict[str, Member]:
    a, b, vector = torch.ones(4, 2), torch.ones(2, 4), torch.full((4,), 2.0)
    pair = SharedPair("example", a, b)
    shared = Term(a, b, 2.0, vector[:2], vector, Owner.SHARED, Owner.SHARED, pair)
    return {
        "LoRA": Member(terms=(Term(a, b, 2.0),)),
        "AdaLoRA": Member(terms=(Term(a, b, 2.0, vector[:2]),)),
        "DoRA": Member(scale=vector, terms=(Term(a, b, 2.0, e=vector),)),
        "(IA)3": Member(scale=vector, bias=Bias(scaled=True)),
        "SSF": ssf(vector, vector),
        "VeRA": Member(terms=(shared,)),
        "OFT": Member(rotation=Rotation(torch.ones(2, 2, 2))),
    }
