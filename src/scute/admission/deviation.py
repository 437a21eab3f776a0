"""How far an adapter is from the identity, projection by projection: an untrained or a diverged one shows here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scute.algebra.form import AdapterForm, Member, column_norms


@dataclass(frozen=True, slots=True)
class Deviation:
    """One projection; None where the adapter has no such slot, or where s needs a base weight that is not there.

    scale_median, scale_max: of |s - 1|. rotation_max, rotation_norm: largest entry and Frobenius norm of R - I.
    delta_norm: Frobenius norm of Σ c A d B e, without the s that DoRA puts behind it.
    """

    projection: str
    scale_median: float | None
    scale_max: float | None
    rotation_max: float | None
    rotation_norm: float | None
    delta_norm: float | None


WeightOf = Callable[[str], Tensor | None]


def deviations(form: AdapterForm, weight_of: WeightOf) -> Iterator[Deviation]:
    """Of every projection of a form with values. weight_of: gives a projection's base weight [in, out], if there is."""
    for name, member in form.members.items():
        scale = member.scale if member.magnitude is None else _resolved(member, weight_of(name))
        off = None if scale is None else (scale.double() - 1).abs()
        turn = None if member.rotation is None else _less_identity(member.rotation.blocks.double())
        yield Deviation(
            name,
            None if off is None else float(off.median()),
            None if off is None else float(off.max()),
            None if turn is None else float(turn.abs().max()),
            None if turn is None else float(turn.norm()),
            _delta_norm(member) if member.terms else None,
        )


def _resolved(member: Member, weight: Tensor | None) -> Tensor | None:
    """s of a magnitude."""
    return None if weight is None or member.magnitude is None else member.magnitude / column_norms(weight, member.terms)


def _less_identity(blocks: Tensor) -> Tensor:
    return blocks - torch.eye(blocks.shape[-1], dtype=blocks.dtype)


def _delta_norm(member: Member) -> float:
    """From the Gram matrices of the factors, which are rank by rank."""
    left = torch.cat([t.c * (t.a.double() if t.d is None else t.a.double() * t.d) for t in member.terms], dim=1)
    right = torch.cat([t.b.double() if t.e is None else t.b.double() * t.e for t in member.terms])
    return float(((left.T @ left) * (right @ right.T)).sum().clamp(min=0).sqrt())
