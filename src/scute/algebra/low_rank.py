"""What low rank can and cannot carry: truncated SVDs, what they leave out, and the rank of an exact fold of s."""

import torch
from torch import Tensor

from scute.algebra.form import Member, column_norms


def truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A [in, k] and B [k, out] whose product is the nearest to the matrix [in, out]; k = min(rank, in, out).

    Nearest in the Frobenius norm. The singular values are shared out evenly, so that A and B are of one size.
    """
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    roots = values[:rank].sqrt()
    return left[:, :rank] * roots, roots[:, None] * right[:rank]


def share_left_out(matrix: Tensor, rank: int) -> float:
    """The share of the squared Frobenius norm that the best approximation of that rank leaves out; 0 of a zero."""
    squares = torch.linalg.svdvals(matrix.double()).square()
    total = float(squares.sum())
    return float(squares[rank:].sum()) / total if total else 0.0


def scale_left_out(scale: Tensor, weight: Tensor, rank: int) -> float:
    """Share of ‖W diag(s - 1)‖² that the best rank-r approximation leaves out (paper, section 3.2, DoRA's scale).

    scale: s, [out]; weight: [in, out].
    """
    return share_left_out(scaled(weight, scale), rank)


def rank_of_exact_fold(member: Member, weight: Tensor) -> int:
    """The least total rank of terms that could replace s exactly (paper, Corollary A1).

    It is rank(W diag(s - 1)) - r, and not below 0, with r the total rank of the member's own and shared terms, and
    ranks counted in float64. weight: W, [in, out]; a magnitude is resolved from it.

    Raises ValueError if the member has a rotation, of which the corollary says nothing.
    """
    if member.rotation is not None:
        raise ValueError("Corollary A1 is about members without a rotation")
    weight = weight.double()
    if member.magnitude is not None:
        member = member.resolve_magnitude(column_norms(weight, member.terms))
    if member.scale is None:
        return 0
    rank = int(torch.linalg.matrix_rank(scaled(weight, member.scale)))
    return max(0, rank - sum(term.rank for term in member.terms))


def scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """W diag(s - 1), [in, out], float64."""
    return weight.double() * (scale.double() - 1)
