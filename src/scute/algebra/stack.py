"""Two adapters on one projection, the second applied to the output of the first (paper, Stacking)."""

from dataclasses import replace

from torch import Tensor

from scute.algebra.form import Bias, Member


def stack(first: Member, second: Member) -> Member:
    """The member that computes F2(x; F1(x)); the order matters.

    With h = F1(x) and β the base bias, F2(x; h) = h ⊙ s2 + (0 if F2 scales the bias else β ⊙ (1 - s2)) + shift2
    + the terms of F2 on the same x. That is what PEFT computes for two active adapters. A bias that either one
    replaces stands for β in both.

    Raises ValueError if a magnitude is unresolved, if `second` has a rotation, or if both replace the bias.
    """
    if first.magnitude is not None or second.magnitude is not None:
        raise ValueError("a magnitude depends on the base weight: resolve it before stacking")
    if second.rotation is not None:
        raise ValueError(
            "the second adapter rotates the input of the base weight, but it is given an output: "
            "an adapter with R can only come first in a stack"
        )
    terms = tuple(replace(t, e=_times(t.e, second.scale)) for t in first.terms) + second.terms
    return Member(first.rotation, _times(first.scale, second.scale), _stack_bias(first, second), terms)


def _stack_bias(first: Member, second: Member) -> Bias:
    one, two = first.bias, second.bias
    if one.replaced is not None and two.replaced is not None:
        raise ValueError("both adapters replace the base bias: at most one of a stack may be trained with a bias")
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
    return 1.0 if slot is None else slot


def _times(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left * right


def _plus(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right
