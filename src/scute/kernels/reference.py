"""The ops in plain torch: what the CPU runs, and what the Triton kernels are tested against.

Every function has the parameters of the op of its name; `scute.kernels.ops` documents them. Products and sums are
float32, or float64 where the tensors are.
"""

# ruff: noqa: ARG001 - a twin takes every parameter of its op

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from scute.kernels.linear import sliced_linear
from scute.kernels.plan import tiles_for
from scute.kernels.routes import Flag, Route


def low_rank(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    row_start: Tensor,
    table: Tensor,
    scale: Tensor,
    shift: Tensor,
    slice_starts: Tensor,
    max_slice: int,
    max_rank: int,
    rows: Tensor,
    tiles_small: Tensor,
    tiles_large: Tensor,
    live: Tensor,
) -> None:
    if not live.tolist()[Route.LOW_RANK]:
        return
    starts, firsts, entries = slice_starts.tolist(), row_start.tolist(), table.tolist()
    for slot, segment in _segments(x, rows, tiles_small, tiles_large):
        factors = slice(firsts[slot], None)
        x_rows = _wide(x.index_select(0, segment))
        for i, (rank, flags) in enumerate(entries[slot]):
            if not rank and not flags & (Flag.SCALE | Flag.SHIFT):
                continue
            columns = slice(starts[i], starts[i + 1])
            total = _wide(y[:, columns].index_select(0, segment))
            if flags & Flag.SCALE:
                total *= scale[slot, columns]
            if flags & Flag.SHIFT:
                total += shift[slot, columns]
            if rank:
                shrunk = x_rows @ _wide(a[i, factors][:rank]).t()
                total += shrunk @ _wide(b[factors, columns][:rank])
            y[:, columns].index_copy_(0, segment, total.to(y.dtype))


def shared(
    y: Tensor,
    x: Tensor,
    shared_a: Tensor,
    shared_b: Tensor,
    pair_rank: Tensor,
    d: Tensor,
    e: Tensor,
    table: Tensor,
    slice_starts: Tensor,
    out_offsets: Tensor,
    max_slice: int,
    in_offset: int,
    shared_rows: Tensor,
    shared_tiles_small: Tensor,
    shared_tiles_large: Tensor,
    slot_of_row: Tensor,
    live: Tensor,
) -> None:
    if not live.tolist()[Route.SHARED]:
        return
    starts, offsets, ranks = slice_starts.tolist(), out_offsets.tolist(), pair_rank.tolist()
    for pair, segment in _segments(x, shared_rows, shared_tiles_small, shared_tiles_large):
        rank = ranks[pair]
        factor = shared_a[pair, :rank, in_offset : in_offset + x.shape[1]]
        shrunk = _wide(x.index_select(0, segment)) @ _wide(factor).t()
        slots = slot_of_row.index_select(0, segment).long()
        for i, offset in enumerate(offsets):
            member = (table[slots, i, 1] & int(Flag.SHARED)).nonzero().squeeze(1)
            if not len(member):
                continue
            columns = slice(starts[i], starts[i + 1])
            factor = shared_b[pair, :rank, offset : offset + starts[i + 1] - starts[i]]
            slot, row = slots[member], segment[member]
            term = (shrunk[member] * d[slot, i, :rank]) @ _wide(factor) * e[slot, columns]
            total = _wide(y[:, columns].index_select(0, row)) + term
            y[:, columns].index_copy_(0, row, total.to(y.dtype))


def rotate(
    x: Tensor,
    rotation: Tensor,
    width: Tensor,
    max_width: int,
    rows: Tensor,
    tiles_small: Tensor,
    tiles_large: Tensor,
    live: Tensor,
) -> Tensor:
    out = x.unsqueeze(0).repeat(rotation.shape[1], 1, 1)
    if not live.tolist()[Route.ROTATION]:
        return out
    in_features, widths = x.shape[1], width.tolist()
    for slot, segment in _segments(x, rows, tiles_small, tiles_large):
        for i, w in enumerate(widths[slot]):
            if not w:
                continue
            blocks = _wide(rotation[slot, i, : in_features * w]).view(-1, w, w)
            x_rows = _wide(x.index_select(0, segment))
            turned = torch.bmm(x_rows.view(len(segment), -1, w).transpose(0, 1), blocks).transpose(0, 1)
            out[i].index_copy_(0, segment, (x_rows + turned.reshape_as(x_rows)).to(x.dtype))
    return out


def base_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slice_starts_host: list[int],
    rotation: Tensor,
    width: Tensor,
    max_width: int,
    rows: Tensor,
    tiles_small: Tensor,
    tiles_large: Tensor,
    live: Tensor,
) -> Tensor:
    if not live.tolist()[Route.ROTATION]:
        return functional.linear(x, weight, bias)
    inputs = rotate(x, rotation, width, max_width, rows, tiles_small, tiles_large, live)
    return sliced_linear(inputs, weight, bias, slice_starts_host)


def _segments(x: Tensor, rows: Tensor, tiles_small: Tensor, tiles_large: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The tiles of the batch, those of one segment merged: (segment, its rows)."""
    tiles, _, _ = tiles_for(x.shape[0], len(tiles_small), tiles_small, tiles_large)
    bounds: dict[int, list[int]] = {}
    for segment, first, count in tiles.tolist():
        if count:
            bounds.setdefault(segment, [first, 0])[1] = first + count
    for segment, (first, end) in bounds.items():
        yield segment, rows[first:end].long()


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
