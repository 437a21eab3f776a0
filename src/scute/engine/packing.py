"""From members on this rank to one host buffer that only needs copying: resolve, fold, cast, lay out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scute.algebra.fold import fold
from scute.algebra.form import Member, Term
from scute.engine.options import Options
from scute.engine.pieces import SliceSlots
from scute.engine.placement import input_range, splits_input
from scute.errors import Code, Refusal
from scute.kernels.routes import FIELDS, UNIT_BYTES, Field, units_of


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter as the arena of this rank takes it, in host memory.

    buffer: uint8 [units * UNIT_BYTES], pinned where there is a GPU: every piece, back to back. entries: int32
    [slices, FIELDS], its rows of the table, with offsets from the start of the buffer and no shared pair yet.
    pair_key: the shared factors it refers to, or None. file_bytes: size of the adapter's file, the measure of the
    host budget (equal on every rank). needs_base_weights: whether it has to be admitted again when these change.
    """

    method: str
    buffer: Tensor
    entries: npt.NDArray[np.int32]
    pair_key: str | None
    file_bytes: int
    needs_base_weights: bool = False

    @property
    def units(self) -> int:
        return self.buffer.numel() // UNIT_BYTES

    @property
    def rank(self) -> int:
        """Largest rank of all slices."""
        return int(self.entries[:, Field.RANK].max(initial=0))

    @property
    def rotates(self) -> bool:
        return bool(self.entries[:, Field.WIDTH].any())


def lay_out(slices: Mapping[int, SliceSlots], total: int, pinned: bool) -> tuple[Tensor, npt.NDArray[np.int32]]:
    """Buffer and entries of an adapter from its slices, by their place among the `total` slices of the model."""
    entries = np.zeros((total, FIELDS), dtype=np.int32)
    units = sum(piece.units for piece in slices.values())
    buffer = torch.zeros(units * UNIT_BYTES, dtype=torch.uint8, pin_memory=pinned)
    unit = 0
    for index, piece in slices.items():
        entry = entries[index]
        entry[[Field.RANK, Field.FLAGS, Field.WIDTH]] = piece.rank, piece.flags, piece.width
        for field, tensor in piece.pieces():
            entry[field] = unit
            first = unit * UNIT_BYTES
            buffer[first : first + tensor.nbytes].copy_(tensor.contiguous().flatten().view(torch.uint8))
            unit += units_of(tensor.nbytes)
    return buffer, entries


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
    return SliceSlots(a, b, scale, shift, d, e, rotation, width)


def _factors(terms: list[Term], dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Terms side by side: a [rank, in], b [rank, out]."""
    if not terms:
        return None, None
    a, b = torch.cat([t.a.T for t in terms]), torch.cat([t.b for t in terms])
    return a.to(dtype), b.to(dtype)


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
    difference = blocks - torch.eye(width, dtype=blocks.dtype, device=blocks.device)
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
