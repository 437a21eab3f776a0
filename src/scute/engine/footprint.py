"""What an adapter takes on one rank that holds the whole model, from its shapes: no engine and no vLLM is needed."""

import torch

from scute.admission.base import BaseModel
from scute.algebra.form import AdapterForm, Member, SharedPair
from scute.engine.pieces import SliceSlots
from scute.kernels.routes import UNIT_BYTES


def packed_bytes(form: AdapterForm, base: BaseModel) -> int:
    """Bytes of the packed adapter, in pinned host memory and again in the arena while it is active.

    In the dtype of the base model, as `packing` counts. A b that turns out to be zero takes no room there.
    """
    units = sum(_piece(name, member, base).units for name, member in form.members.items())
    return units * UNIT_BYTES


def pair_bytes(form: AdapterForm, base: BaseModel) -> int:
    """Bytes of its shared pair, which all adapters that have the same hold once."""
    pairs = {term.pair.key: term.pair for member in form.members.values() for term in member.terms if term.pair}
    return sum(_num_elements(pair) for pair in pairs.values()) * base.dtype.itemsize


def _num_elements(pair: SharedPair) -> int:
    return pair.a.numel() + pair.b.numel()


def _piece(name: str, member: Member, base: BaseModel) -> SliceSlots:
    projection, dtype = base.projections[name], base.dtype
    inputs, outputs = projection.in_features, projection.out_features
    width = 0 if member.rotation is None else member.rotation.width
    shared = next((term for term in member.terms if term.pair is not None), None)
    has_scale = member.scale is not None or member.magnitude is not None
    return SliceSlots(
        a=_shape(member.rank, inputs, dtype=dtype) if member.rank else None,
        b=_shape(member.rank, outputs, dtype=dtype) if member.rank else None,
        scale=_shape(outputs) if has_scale else None,
        shift=_shape(outputs) if _has_shift(member, has_scale, projection.has_bias) else None,
        d=_shape(shared.rank) if shared is not None else None,
        e=_shape(outputs) if shared is not None else None,
        rotation=_shape(inputs * width, dtype=dtype) if width else None,
        width=width,
    )


def _has_shift(member: Member, has_scale: bool, base_has_bias: bool) -> bool:
    """Whether b is more than the base bias times s."""
    bias = member.bias
    changed = bias.replaced is not None or bias.shift is not None or bias.factor is not None
    return changed or (base_has_bias and has_scale and not bias.scaled)


def _shape(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
