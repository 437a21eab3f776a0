"""The fold rule (paper, Proposition A1): which slots merge into a neighbour that the adapter owns.

e folds into an owned B. d folds into an owned A, or else an owned B. c folds into an owned A, d, B or e, in that
order; the vectors are always the adapter's own. s, b and R never fold: only the shared W is next to them.
A fold makes a new tensor, so it writes neither into shared factors nor into the member that it was given.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scute.algebra.form import Member, Owner, Term

NEXT_TO_WEIGHT = "only the base weight is next to it, and that is shared"
NEXT_TO_SHARED = "nothing next to it belongs to the adapter"


@dataclass(frozen=True, slots=True)
class Fold:
    """What became of one slot that is not the identity.

    slot: "c", "d", "e", "s", "b" or "R"; term: index of its term, None for s, b and R; into: the tensor that took
    it ("A", "B", "d", "e"), None if the slot stays live; reason: why, for a reader.
    """

    slot: str
    term: int | None
    into: str | None
    reason: str


def fold(member: Member) -> tuple[Member, tuple[Fold, ...]]:
    """Fold every slot that can be folded; the result computes the same function.

    Afterwards a term that owns both factors has c = 1 and neither d nor e; a term on shared factors has c = 1 as
    long as it has a d or an e. float16 and bfloat16 factors that take a slot become float32, others keep their
    dtype. A magnitude is not touched: resolve it before or after, and fold its e once it is there.
    """
    folds: list[Fold] = []
    terms = []
    for index, term in enumerate(member.terms):
        folded, records = _fold_term(term, index)
        terms.append(folded)
        folds += records
    folds += [Fold(slot, None, None, NEXT_TO_WEIGHT) for slot in live_slots(member) if slot in ("R", "s", "b")]
    return replace(member, terms=tuple(terms)), tuple(folds)


def live_slots(member: Member) -> tuple[str, ...]:
    """The slots that are not the identity, in the order of the formula: R, s, b, c, d, e.

    b is live if the adapter has a bias of its own; a base bias that merely follows s is not a slot of its own.
    A magnitude stands for a live s.
    """
    bias = member.bias
    present = {
        "R": member.rotation is not None,
        "s": member.scale is not None or member.magnitude is not None,
        "b": any(part is not None for part in (bias.replaced, bias.shift, bias.factor)),
        "c": any(term.c != 1.0 for term in member.terms),
        "d": any(term.d is not None for term in member.terms),
        "e": any(term.e is not None for term in member.terms),
    }
    return tuple(slot for slot, is_present in present.items() if is_present)


def _fold_term(term: Term, index: int) -> tuple[Term, list[Fold]]:
    folds = []
    if term.e is not None:
        term, into = _fold_e(term, term.e)
        folds.append(_record("e", index, into))
    if term.d is not None:
        term, into = _fold_d(term, term.d)
        folds.append(_record("d", index, into))
    if term.c != 1.0:
        term, into = _fold_c(term)
        folds.append(_record("c", index, into))
    return term, folds


def _fold_e(term: Term, e: Tensor) -> tuple[Term, str | None]:
    if _owns_b(term):
        return replace(term, b=product(term.b, e), e=None), "B"
    return term, None


def _fold_d(term: Term, d: Tensor) -> tuple[Term, str | None]:
    if _owns_a(term):
        return replace(term, a=product(term.a, d), d=None), "A"
    if _owns_b(term):
        return replace(term, b=product(term.b, d[:, None]), d=None), "B"
    return term, None


def _fold_c(term: Term) -> tuple[Term, str | None]:
    if _owns_a(term):
        return replace(term, a=product(term.a, term.c), c=1.0), "A"
    if term.d is not None:
        return replace(term, d=product(term.d, term.c), c=1.0), "d"
    if _owns_b(term):
        return replace(term, b=product(term.b, term.c), c=1.0), "B"
    if term.e is not None:
        return replace(term, e=product(term.e, term.c), c=1.0), "e"
    return term, None


def _owns_a(term: Term) -> bool:
    return term.a_owner is Owner.ADAPTER


def _owns_b(term: Term) -> bool:
    return term.b_owner is Owner.ADAPTER


def product(tensor: Tensor, slot: Tensor | float) -> Tensor:
    """tensor * slot in the wider precision of the two, float32 or better, so that float16 does not overflow."""
    kept = torch.promote_types(tensor.dtype, torch.float32)
    if isinstance(slot, float):
        return tensor.to(kept) * slot
    wide = torch.promote_types(kept, slot.dtype)
    return (tensor.to(wide) * slot.to(wide)).to(kept)


def _record(slot: str, index: int, into: str | None) -> Fold:
    reason = NEXT_TO_SHARED if into is None else f"{into} is next to it and belongs to the adapter"
    return Fold(slot, index, into, reason)
