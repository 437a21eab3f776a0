"""One projection's update as the factors A and B of a LoRA: exactly where there is a way, else by an SVD."""

from dataclasses import replace

import torch
from torch import Tensor

from scute.admission.base import Projection
from scute.algebra.fold import fold
from scute.algebra.form import Member, Owner, Term
from scute.algebra.low_rank import truncated_svd
from scute.errors import Code, Refusal

DAMPING = 1e-6
"""Added to the second moment, as a share of its mean diagonal: inputs that the data never shows still count a little,
and the Cholesky factor exists."""


def refuse_biases(module: str, member: Member, projection: Projection) -> None:
    """Refuse CONVERSION_BIAS if the member gives the projection another bias than its own."""
    bias = member.bias
    if bias.replaced is not None or bias.shift is not None or bias.factor is not None:
        what = "has a bias of its own"
    elif bias.scaled and member.scale is not None and projection.has_bias:
        what = "scales the base bias"
    else:
        return
    raise Refusal(
        Code.CONVERSION_BIAS,
        f"on {module} the adapter {what} (slot b), and a LoRA has A and B only. Serve the adapter as it is.",
    )


def exact_factors(member: Member, rank: int) -> Term | None:
    """The member's own terms as one term of at most that rank, or None if that is not all that it does.

    A copy of shared factors is the adapter's own, so VeRA's d and e fold into it (paper, section 3.2). float32; the
    values are those of the file up to the rounding of the fold.
    """
    if member.rotation is not None or member.scale is not None or member.magnitude is not None:
        return None
    if not 0 < sum(term.rank for term in member.terms) <= rank:
        return None
    owned = [replace(t, a_owner=Owner.ADAPTER, b_owner=Owner.ADAPTER, pair=None) for t in member.terms]
    terms = fold(Member(terms=tuple(owned)))[0].terms
    return Term(torch.cat([t.a.float() for t in terms], dim=1), torch.cat([t.b.float() for t in terms]))


def svd_factors(update: Tensor, rank: int) -> Term:
    """The term nearest to the update, [in, out], in the Frobenius norm."""
    return Term(*truncated_svd(update, rank))


def activation_aware_factors(update: Tensor, moment: Tensor, rank: int) -> Term:
    """The term with the least mean squared error on inputs of that second moment (paper, section 6.2: ASVD).

    update: [in, out]; moment: E[xᵀ x], [in, in], float64. With the moment = L Lᵀ, the error of a term on such inputs is
    ‖Lᵀ (ΔW - A B)‖², so A B is L⁻ᵀ times the truncated SVD of Lᵀ ΔW. Yuan et al. (2023) scale by a diagonal; this
    is the whole matrix, which is optimal.
    """
    damped = moment + DAMPING * moment.diagonal().mean().clamp(min=1e-30) * torch.eye(len(moment)).to(moment)
    root = torch.linalg.cholesky(damped)
    a, b = truncated_svd(root.T @ update.double(), rank)
    a = torch.linalg.solve_triangular(root.T, a, upper=True)
    return Term(a.to(update), b.to(update))


def squared_rest(update: Tensor, term: Term) -> float:
    """‖ΔW - A B‖², summed in float64."""
    return squared_norm(update - term.a.to(update) @ term.b.to(update))


def squared_norm(matrix: Tensor) -> float:
    """The squared Frobenius norm, summed in float64."""
    return float(matrix.double().square().sum())
