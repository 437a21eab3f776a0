"""The reference: the normal form written out in plain torch, one line per slot."""

import torch
from torch import Tensor

from scute.algebra.form import Member, Rotation, Term, column_norms


def evaluate(member: Member, x: Tensor, weight: Tensor, base_bias: Tensor | None) -> Tensor:
    """The adapted projection y, [tokens, out], in the dtype of x (paper, equation 1).

    x: [tokens, in]; weight: [in, out], the transpose of `nn.Linear.weight`; base_bias: [out] or None. Every slot
    is moved to the device of x and cast to its dtype. A magnitude is resolved from the weight.
    """
    if member.magnitude is not None:
        member = member.resolve_magnitude(column_norms(weight, member.terms))
    y = rotate(x, member.rotation) @ weight.to(x)
    scale = None if member.scale is None else member.scale.to(x.device)
    if scale is not None:
        y = y * scale.to(x)
    bias = member.bias.on(x.device).resolve(base_bias, scale)
    if bias is not None:
        y = y + bias.to(x)
    for term in member.terms:
        y = y + apply_term(x, term)
    return y


def rotate(x: Tensor, rotation: Rotation | None) -> Tensor:
    """x R, [tokens, in]."""
    if rotation is None:
        return x
    blocked = x.reshape(*x.shape[:-1], -1, rotation.width)
    return torch.einsum("...ni,nij->...nj", blocked, rotation.blocks.to(x)).flatten(-2)


def apply_term(x: Tensor, term: Term) -> Tensor:
    """c (((x A) ⊙ d) B) ⊙ e, [tokens, out]."""
    inner = x @ term.a.to(x)
    if term.d is not None:
        inner = inner * term.d.to(x)
    outer = inner @ term.b.to(x)
    if term.e is not None:
        outer = outer * term.e.to(x)
    return term.c * outer
