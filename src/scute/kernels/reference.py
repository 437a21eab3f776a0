"""The ops in plain torch: what the CPU runs, and what the Triton kernels are tested against.

Every function has the parameters of the op of its name; `scute.kernels.ops` documents them. Products and sums are
float32, or float64 where the tensors are.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from scute.kernels.arguments import Slots, unpack
from scute.kernels.gemm import sliced_linear
from scute.kernels.plan import SMALL_TILE, BatchPlan, tile_height
from scute.kernels.routes import UNIT_BYTES, Field, Flag, Part, Route


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: object) -> Tensor:
    slots, plan = unpack(arguments)
    if slots.rotation_width and plan.is_live(Route.ROTATION):
        y = sliced_linear(rotate(x, *arguments), weight, bias, slots.slice_starts)
    else:
        y = functional.linear(x, weight, bias)
    adapt(y, x, *arguments)
    return y


def adapt(y: Tensor, x: Tensor, *arguments: object) -> None:
    slots, plan = unpack(arguments)
    if not plan.is_live(Route.LOW_RANK):
        return
    shrunk = _shared_shrink(x, slots, plan) if plan.is_live(Route.SHARED) and len(slots.pair_rank) else None
    for slot, segment in _segments(x, plan, Part.TILES_SMALL, Part.ROWS):
        x_rows = _wide(x.index_select(0, segment))
        for i, entry in enumerate(slots.table[slot].tolist()):
            flags, rank = entry[Field.FLAGS], entry[Field.RANK]
            if not rank and not flags & (Flag.SCALE | Flag.SHIFT | Flag.SHARED):
                continue
            columns = slice(slots.slice_starts[i], slots.slice_starts[i + 1])
            width = columns.stop - columns.start
            total = _wide(y[:, columns].index_select(0, segment))
            if flags & Flag.SCALE:
                total *= _piece(slots.vectors, entry[Field.SCALE], width)
            if flags & Flag.SHIFT:
                total += _piece(slots.vectors, entry[Field.SHIFT], width)
            if rank:
                a = _piece(slots.factors, entry[Field.A], rank, x.shape[1])
                b = _piece(slots.factors, entry[Field.B], rank, width)
                total += (x_rows @ _wide(a).t()) @ _wide(b)
            if flags & Flag.SHARED and shrunk is not None:
                values, pair_of_row = shrunk
                pair = int(pair_of_row[segment[0]])
                pair_rank = int(slots.pair_rank[pair])
                d = _piece(slots.vectors, entry[Field.D], pair_rank)
                e = _piece(slots.vectors, entry[Field.E], width)
                offset = slots.out_offsets[i]
                b = slots.shared_b[pair, :pair_rank, offset : offset + width]
                total += ((values[segment, :pair_rank] * d) @ _wide(b)) * e
            y[:, columns].index_copy_(0, segment, total.to(y.dtype))


def rotate(x: Tensor, *arguments: object) -> Tensor:
    slots, plan = unpack(arguments)
    out = x.unsqueeze(0).repeat(slots.slices, 1, 1)
    if not plan.is_live(Route.ROTATION):
        return out
    for slot, segment in _segments(x, plan, Part.ROTATED_SMALL, Part.ROWS):
        for i, entry in enumerate(slots.table[slot].tolist()):
            w = entry[Field.WIDTH]
            if not w:
                continue
            blocks = _wide(_piece(slots.factors, entry[Field.ROTATION], x.shape[1] // w, w, w))
            x_rows = _wide(x.index_select(0, segment))
            turned = torch.bmm(x_rows.view(len(segment), -1, w).transpose(0, 1), blocks).transpose(0, 1)
            out[i].index_copy_(0, segment, (x_rows + turned.reshape_as(x_rows)).to(x.dtype))
    return out


def _shared_shrink(x: Tensor, slots: Slots, plan: BatchPlan) -> tuple[Tensor, Tensor]:
    """(x A_shared [T, shared rank], pair of every row [T]) for the rows that have a shared pair."""
    values = torch.zeros(x.shape[0], slots.shared_a.shape[1], dtype=_wide(x[:0]).dtype)
    pair_of_row = torch.full((x.shape[0],), -1)
    for pair, segment in _segments(x, plan, Part.SHARED_TILES_SMALL, Part.SHARED_ROWS):
        rank = int(slots.pair_rank[pair])
        factor = slots.shared_a[pair, :rank, slots.in_offset : slots.in_offset + x.shape[1]]
        values[segment, :rank] = _wide(x.index_select(0, segment)) @ _wide(factor).t()
        pair_of_row[segment] = pair
    return values, pair_of_row


def _segments(x: Tensor, plan: BatchPlan, tiles: Part, rows: Part) -> Iterator[tuple[int, Tensor]]:
    """The tiles of the batch, those of one segment merged: (segment, its rows). tiles: the list of small tiles."""
    if tile_height(x.shape[0]) != SMALL_TILE:
        tiles = Part(tiles + 1)
    bounds: dict[int, list[int]] = {}
    for segment, first, count in plan.part(tiles).view(-1, 3).tolist():
        if not count:
            break
        bounds.setdefault(segment, [first, 0])[1] = first + count
    for segment, (first, end) in bounds.items():
        yield segment, plan.part(rows)[first:end].long()


def _piece(arena: Tensor, unit: int, *shape: int) -> Tensor:
    size = 1
    for dimension in shape:
        size *= dimension
    first = unit * (UNIT_BYTES // arena.element_size())
    return arena[first : first + size].view(shape)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
