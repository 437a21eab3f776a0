"""What a member changes of the base weight: the matrix ΔW with F(x) = x (W + ΔW) + b (paper, section 4.2)."""

import torch
from torch import Tensor

from scute.algebra.form import Member, Rotation, Term, column_norms


def update(member: Member, weight: Tensor) -> Tensor:
    """ΔW = (R - I) W ⊙ s + W ⊙ (s - 1) + Σ c (A ⊙ d) B ⊙ e, [in, out], in the dtype of the weight.

    weight: [in, out]. Summed from its parts, so that a small update is not lost beside W. A magnitude is resolved
    from the weight. The biases are no part of it.
    """
    if member.magnitude is not None:
        member = member.resolve_magnitude(column_norms(weight, member.terms))
    total = torch.zeros_like(weight) if member.rotation is None else _turned(member.rotation, weight)
    if member.scale is not None:
        scale = member.scale.to(weight)
        total = total * scale + weight * (scale - 1)
    for term in member.terms:
        total = total + product_of(term, weight)
    return total


def product_of(term: Term, like: Tensor) -> Tensor:
    """c (A ⊙ d) B ⊙ e, [in, out], in the dtype and on the device of `like`."""
    a, b = term.a.to(like), term.b.to(like)
    if term.d is not None:
        a = a * term.d.to(like)
    if term.e is not None:
        b = b * term.e.to(like)
    return term.c * (a @ b)


def _turned(rotation: Rotation, weight: Tensor) -> Tensor:
    """(R - I) W, [in, out]."""
    blocks = rotation.blocks.to(weight)
    blocks = blocks - torch.eye(rotation.width, dtype=blocks.dtype, device=blocks.device)
    rows = weight.reshape(-1, rotation.width, weight.shape[1])
    return torch.einsum("nij,njo->nio", blocks, rows).reshape(weight.shape)
