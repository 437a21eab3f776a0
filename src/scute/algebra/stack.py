"""Adapters on one projection, each applied to the layer that the ones before it leave (paper, Stacking)."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from scute.algebra.fold import product
from scute.algebra.form import AdapterForm, Bias, Member, Owner, Term
from scute.algebra.rotations import compose, rotate_rows


class Obstacle(Enum):
    """Why two members have no stack that is a member; the value says it to a reader."""

    BIAS = "both are trained with a base bias of their own, and there is only one"
    ROTATION = "the second transforms the input of the first, whose A is shared and cannot take the transform up"


def obstacle(first: Member, second: Member) -> Obstacle | None:
    """What keeps F2 on F1 from being a member, if anything does; their magnitudes apart.

    Members of a longer stack must all get along by twos.
    """
    if first.bias.replaced is not None and second.bias.replaced is not None:
        return Obstacle.BIAS
    if second.rotation is not None and any(term.a_owner is Owner.SHARED for term in first.terms):
        return Obstacle.ROTATION
    return None


def stack(first: Member, second: Member) -> Member:
    """The member of `second` on a layer that `first` adapts already; the order matters.

    With F1 in the place of the base layer, F2 computes F1(x R2) ⊙ s2 + (0 if F2 scales the bias else β ⊙ (1 - s2)) +
    shift2 + the terms of F2 on x, where β is the base bias. That is what PEFT's layers compute with the first as
    `base_layer` of the second. R2 goes into the A of F1 and before its R, s2 into its s, its e and its shift. A bias
    that either one replaces stands for β in both.

    Raises ValueError if a magnitude is unresolved, and for an `obstacle`.
    """
    if first.magnitude is not None or second.magnitude is not None:
        raise ValueError("a magnitude depends on the base weight: resolve it before stacking")
    found = obstacle(first, second)
    if found is not None:
        raise ValueError(f"two adapters cannot be stacked: {found.value}")
    terms = tuple(_carry(term, second) for term in first.terms) + second.terms
    rotation = compose(second.rotation, first.rotation)
    return Member(rotation, _times(first.scale, second.scale), _stack_bias(first, second), terms)


def stack_forms(forms: Sequence[AdapterForm]) -> AdapterForm:
    """Adapters as one, projection by projection; what only one adapts stays as it is. Raises what `stack` raises."""
    members: dict[str, Member] = {}
    for form in forms:
        for name, member in form.members.items():
            members[name] = stack(members[name], member) if name in members else member
    return AdapterForm(stacked_method(forms), members)


def stacked_method(forms: Sequence[AdapterForm]) -> str:
    """What a reader calls the stack, as "(IA)3 + LoRA"."""
    return " + ".join(form.method for form in forms) if len(forms) <= 4 else f"stack of {len(forms)}"


def stacked_rank(forms: Sequence[AdapterForm]) -> int:
    """The largest rank of a projection: ranks add up."""
    names = {name for form in forms for name in form.members}
    return max((sum(form.members[n].rank for form in forms if n in form.members) for n in names), default=0)


def _carry(term: Term, second: Member) -> Term:
    """A term of the first member, behind the R and before the s of the second."""
    a = term.a if second.rotation is None else rotate_rows(second.rotation, term.a)
    return replace(term, a=a, e=_times(term.e, second.scale))


def _stack_bias(first: Member, second: Member) -> Bias:
    one, two = first.bias, second.bias
    replaced = one.replaced if two.replaced is None else two.replaced
    carried = None if one.shift is None else _times(one.shift, second.scale)
    shift = _plus(carried, two.shift)
    scaling = {m.bias.scaled for m in (first, second) if m.scale is not None}
    if one.factor is None and two.factor is None and len(scaling) < 2:
        return Bias(True in scaling, replaced, shift)
    return Bias(False, replaced, shift, _bias_factor(first, second))


def _bias_factor(first: Member, second: Member) -> Tensor | None:
    """What β is multiplied by: f1 s2 + (f2 - s2), with f the factor that each member alone applies to β."""
    f1, f2 = (_or_one(_times(m.scale if m.bias.scaled else None, m.bias.factor)) for m in (first, second))
    s2 = _or_one(second.scale)
    factor = f1 * s2 + (f2 - s2)
    return factor if isinstance(factor, Tensor) else None


def _or_one(slot: Tensor | None) -> Tensor | float:
    return 1.0 if slot is None else _wide(slot)


def _times(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return product(left, right)


def _plus(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return _wide(left) + _wide(right)


def _wide(slot: Tensor) -> Tensor:
    """In float32 or better: what float16 holds may not hold its sums."""
    return slot.to(torch.promote_types(slot.dtype, torch.float32))
