"""A diagonal R on the down projection of a gated MLP, as a scale of its up projection (paper, section 3.1).

down(act(gate(x)) * up(x)): what scales the input of down may as well scale the output of up, where it costs nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from scute.admission.base import BaseModel
from scute.algebra.fold import product
from scute.algebra.form import AdapterForm, Bias, Member
from scute.algebra.stack import stack


def onto_up_projections(forms: Sequence[AdapterForm], base: BaseModel) -> tuple[AdapterForm, ...]:
    """The adapters of a stack, in order, or one alone, with every such R on the up projection that can be there.

    Together they compute what the given ones do. The scale is of all that the up projection gives, so it goes to the
    last adapter, behind everything. An R stays where it is if that adapter's s is not known yet, or if a term or
    another R that comes after it reads the input as it is without it.
    """
    members = [dict(form.members) for form in forms]
    for down, up in base.gated_up.items():
        last = members[-1].get(up, Member())
        vector = None if last.magnitude is not None else _take_diagonals(members, down)
        if vector is not None:
            members[-1][up] = stack(last, Member(scale=vector, bias=Bias(scaled=True)))
    return tuple(replace(form, members=mine) for form, mine in zip(forms, members, strict=True))


def _take_diagonals(members: Sequence[dict[str, Member]], down: str) -> Tensor | None:
    """Removes the diagonals that nothing else is applied after; their product, [in], or None."""
    vector: Tensor | None = None
    for mine in reversed(members):
        member = mine.get(down)
        if member is None:
            continue
        if member.terms or (member.rotation is not None and member.rotation.width != 1):
            break
        if member.rotation is not None:
            diagonal = member.rotation.blocks.flatten()
            vector = diagonal if vector is None else product(vector, diagonal)
            _put(mine, down, replace(member, rotation=None))
    return vector


def _put(members: dict[str, Member], name: str, member: Member) -> None:
    """In place of the old one; a member that is the identity by now is left out."""
    bias = member.bias
    if member.scale is None and bias.replaced is None and bias.shift is None and bias.factor is None:
        del members[name]
    else:
        members[name] = member
