"""From members on this rank to host tensors that only need copying: resolve, fold, cast."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scute.algebra.fold import fold
from scute.algebra.form import Member, Term
from scute.engine.options import Options
from scute.engine.placement import input_range, splits_input
from scute.engine.slots import SliceSlots
from scute.errors import Code, Refusal


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter as the layers of this rank take it.

    layers: wrapped layer's name to its slices. pair_key: the shared factors it refers to, or None.
    file_bytes: size of the adapter's file, the measure of the host budget (equal on every rank).
    """

    method: str
    layers: dict[str, list[SliceSlots | None]]
    pair_key: str | None
    file_bytes: int

    @property
    def rotates(self) -> bool:
        return any(s is not None and s.rotation is not None for layer in self.layers.values() for s in layer)


def pack(layer: Any, index: int, member: Member, dtype: torch.dtype, options: Options) -> SliceSlots:
    """Slice `index` of a wrapped layer from its member on this rank; the magnitude is resolved by now."""
    folded, _ = fold(member)
    owned = [t for t in folded.terms if t.pair is None]
    shared = [t for t in folded.terms if t.pair is not None]
    if len(shared) > 1:
        raise Refusal(Code.MODULE_UNSUPPORTED, "an adapter with two shared terms on one projection is not served.")
    a, b = _factors(owned, dtype)
    d, e = _vectors(shared, layer.output_slices[index])
    rotation, width = _rotation(layer, folded, dtype, options)
    scale = None if folded.scale is None else folded.scale.float()
    shift = _shift(layer, index, folded)
    return SliceSlots(_host(a), _host(b), _host(scale), _host(shift), _host(d), _host(e), _host(rotation), width)


def _factors(terms: list[Term], dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Terms side by side: a [rank, in], b [rank, out]."""
    if not terms:
        return None, None
    a, b = torch.cat([t.a.T for t in terms]), torch.cat([t.b for t in terms])
    return a.to(dtype).contiguous(), b.to(dtype).contiguous()


def _vectors(terms: list[Term], out: int) -> tuple[Tensor | None, Tensor | None]:
    if not terms:
        return None, None
    (term,) = terms
    d = torch.ones(term.rank) if term.d is None else term.d
    e = torch.ones(out) if term.e is None else term.e
    return d.float() * term.c, e.float()


def _rotation(layer: Any, member: Member, dtype: torch.dtype, options: Options) -> tuple[Tensor | None, int]:
    """R - I flattened; the difference keeps R's small entries, which R in half precision would round away."""
    if member.rotation is None:
        return None, 0
    blocks = member.rotation.blocks
    width = member.rotation.width
    if width > options.rotation_width:
        raise Refusal(
            Code.CAPACITY_ROTATION,
            f"its input transform has blocks of {width}, wider than rotation_width {options.rotation_width}; "
            "raise rotation_width in additional_config['scute'].",
        )
    if blocks.shape[0] * width != input_range(layer)[1]:
        raise Refusal(Code.TENSOR_SHAPE, f"an input transform covers {blocks.shape[0] * width} inputs only.")
    difference = blocks - torch.eye(width, dtype=blocks.dtype)
    return difference.flatten().to(dtype), width


def _shift(layer: Any, index: int, member: Member) -> Tensor | None:
    """What is left to add once the base output, its bias included, is scaled: b - s ⊙ base bias."""
    base = _base_bias(layer, index)
    if layer.base_layer.skip_bias_add:
        scales_bias = base is not None and member.bias.resolve(base, member.scale) is not base
        if scales_bias or member.bias.replaced is not None or member.bias.shift is not None:
            raise Refusal(
                Code.MODULE_UNSUPPORTED,
                "it changes the bias of a layer whose bias this model adds elsewhere; this cannot be served exactly.",
            )
        return None
    bias = member.bias.resolve(base, member.scale)
    if bias is None:
        return None
    if base is not None:
        bias = bias - (base if member.scale is None else base * member.scale)
    return bias.float() if torch.any(bias) else None


def _base_bias(layer: Any, index: int) -> Tensor | None:
    """The base layer's bias as this rank adds it to slice `index`, [out] float32 on the CPU."""
    bias = getattr(layer.base_layer, "bias", None)
    if bias is None or (splits_input(layer) and layer.tp_rank > 0):
        return None
    first = sum(layer.output_slices[:index])
    return bias.detach()[first : first + layer.output_slices[index]].float().cpu()


def _host(tensor: Tensor | None) -> Tensor | None:
    """Pinned, so that activating the adapter does not wait for its copies; never a view that keeps more alive."""
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor.pin_memory() if torch.cuda.is_available() else tensor
