"""Which rows of a batch belong to which adapter: the metadata that the kernels of one step read."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from scute.kernels.routes import Part, Route

SMALL_TILE = 16
LARGE_TILE = 32
HEIGHTS = (SMALL_TILE, LARGE_TILE)
RANK_CHUNKS = (16, 64)
"""Ranks that one work item of the shrink covers, by tile height: a longer rank is shared out over several."""

_SMALL_BATCH = 256

Ints = npt.NDArray[np.int32]


def tile_height(tokens: int) -> int:
    """Rows per tile for a batch of `tokens` rows; small tiles waste less where every adapter has few rows."""
    return SMALL_TILE if tokens <= _SMALL_BATCH else LARGE_TILE


def tile_count(tokens: int, height: int, segments: int) -> int:
    """An upper bound on the tiles that `tokens` rows in at most `segments` segments need."""
    return min(tokens, -(-tokens // height) + segments)


def shrink_items(tiles: int, max_rank: int, shared_tiles: int, shared_rank: int, chunk: int) -> int:
    """An upper bound on the work items of the shrink."""
    return tiles * -(-max_rank // chunk) + shared_tiles * -(-shared_rank // chunk)


@dataclass(slots=True)
class Residents:
    """What the slots and the shared pairs of the device hold, as far as the plan needs it; on the host.

    rank [slots]: largest rank of the slot over all layers, 0 without factors. pair [slots]: its shared pair or -1.
    rotated [slots]: whether it rotates the input of any layer. pair_rank [pairs]: rank of every shared pair.
    """

    rank: Ints
    pair: Ints
    rotated: npt.NDArray[np.bool_]
    pair_rank: Ints

    @classmethod
    def none(cls, slots: int, pairs: int) -> "Residents":
        """Slots and pairs that hold nothing."""
        zeros = np.zeros(slots, dtype=np.int32)
        return cls(zeros, zeros - 1, zeros > 0, np.zeros(pairs, dtype=np.int32))


class BatchPlan:
    """Rows grouped by adapter slot and cut into tiles, at fixed device addresses (CUDA graphs record them).

    buffer: int32 on the device; part p of it starts at offsets[p] (`Part`):
      ROWS [max_tokens]                 rows of adapters, sorted by slot; base rows are left out
      SLOT_OF_ROW [max_tokens]          slot of every row of the batch; -1 for base rows and past the end
      SHARED_ROWS [max_tokens]          rows whose slot has a shared pair, sorted by pair
      TILES_* [n, 3]                    (slot, first position in ROWS, count), count <= 16 or 32; 0 if unused
      SHARED_TILES_* [n, 3]             (pair, first position in SHARED_ROWS, count)
      SHRINK_* [n, 4]                   (slot, or -1 - pair; first; count; first rank): some ranks of a tile
      ROTATED_* [n, 3]                  the TILES whose slot rotates the input of any layer
    Entries of ROWS and SHARED_ROWS past the last tile are undefined.

    live: int32 [3] on the CPU, indexed by `Route`. The ops read it when they run, so a compiled graph cannot
    freeze it.
    """

    def __init__(
        self, max_tokens: int, slots: int, pairs: int, max_rank: int, shared_rank: int, device: torch.device | str
    ) -> None:
        self.max_tokens = max_tokens
        self.slots = slots
        sizes = dict.fromkeys((Part.ROWS, Part.SLOT_OF_ROW, Part.SHARED_ROWS), max_tokens)
        for size, (height, chunk) in enumerate(zip(HEIGHTS, RANK_CHUNKS, strict=True)):
            tiles = tile_count(max_tokens, height, slots)
            shared_tiles = tile_count(max_tokens, height, pairs)
            sizes[Part(Part.TILES_SMALL + size)] = 3 * tiles
            sizes[Part(Part.SHARED_TILES_SMALL + size)] = 3 * shared_tiles
            items = shrink_items(tiles, max_rank, shared_tiles, shared_rank, chunk)
            sizes[Part(Part.SHRINK_SMALL + size)] = 4 * items
            sizes[Part(Part.ROTATED_SMALL + size)] = 3 * tiles
        self._sizes = [sizes[part] for part in Part]
        self.offsets = [0, *accumulate(self._sizes)][:-1]
        self.buffer = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        self.part(Part.SLOT_OF_ROW).fill_(-1)
        self.live = torch.zeros(len(Route), dtype=torch.int32)

    def update(
        self, slot_of_token: npt.NDArray[np.integer], residents: Residents, *, force_routes: bool = False
    ) -> None:
        """Describe the next step: sort on the host, then copy to the device once, without waiting for it.

        slot_of_token [n]: slot of every real row, -1 for the base model. force_routes: mark every route live, for
        profiling and graph capture.

        Raises ValueError if there are more rows than `max_tokens` or slots outside -1..slots-1.
        """
        tokens = len(slot_of_token)
        if tokens > self.max_tokens:
            raise ValueError(f"the batch has {tokens} rows but the plan holds {self.max_tokens}")
        # A fresh host buffer: the copy of the last step may still be reading the previous one.
        host_buffer = torch.zeros(self.buffer.shape, dtype=torch.int32, pin_memory=self.buffer.is_cuda)
        host = {part: self.part(part, host_buffer).numpy() for part in Part}

        slot_of_row = np.asarray(slot_of_token, dtype=np.int32)
        host[Part.SLOT_OF_ROW][:tokens] = slot_of_row
        host[Part.SLOT_OF_ROW][tokens:] = -1
        counts = _group(slot_of_row, host[Part.ROWS], self.slots)
        # Index -1 of the appended array is the base model's "no pair".
        pair_of_row = np.append(residents.pair, -1).astype(np.int32)[slot_of_row]
        shared_counts = _group(pair_of_row, host[Part.SHARED_ROWS], None)

        for size, (height, chunk) in enumerate(zip(HEIGHTS, RANK_CHUNKS, strict=True)):
            tiles = _cut(counts, height, host[Part(Part.TILES_SMALL + size)])
            shared_tiles = _cut(shared_counts, height, host[Part(Part.SHARED_TILES_SMALL + size)])
            _fill(host[Part(Part.ROTATED_SMALL + size)], tiles[residents.rotated[tiles[:, 0]]])
            items = _chunk(tiles, residents.rank, chunk)
            shared_items = _chunk(shared_tiles, residents.pair_rank, chunk)
            shared_items[:, 0] = -1 - shared_items[:, 0]
            _fill(host[Part(Part.SHRINK_SMALL + size)], np.concatenate((items, shared_items)))

        self.buffer.copy_(host_buffer, non_blocking=True)
        self.live[Route.LOW_RANK] = force_routes or bool(counts.any())
        self.live[Route.SHARED] = force_routes or bool(shared_counts.any())
        self.live[Route.ROTATION] = force_routes or bool(counts[residents.rotated].any())

    def part(self, part: Part, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """One list of the plan, as a flat view of the device buffer, or of another of its size."""
        buffer = self.buffer if buffer is None else buffer
        return buffer[self.offsets[part] : self.offsets[part] + self._sizes[part]]


def _group(keys: Ints, rows: Ints, limit: int | None) -> npt.NDArray[np.int64]:
    """Write the indices of the keys >= 0 to `rows`, stably sorted by key; returns the count per key."""
    order = np.argsort(keys.astype(np.int16), kind="stable")
    if len(order) and keys[order[0]] < -1:
        raise ValueError(f"slot {keys[order[0]]} is below -1")
    adapter_rows = order[np.count_nonzero(keys < 0) :]
    rows[: len(adapter_rows)] = adapter_rows
    counts = np.bincount(keys[adapter_rows], minlength=limit or 0)
    if limit is not None and len(counts) > limit:
        raise ValueError(f"slot {len(counts) - 1} is outside the {limit} slots of the plan")
    return counts


def _cut(counts: npt.NDArray[np.int64], height: int, part: Ints) -> Ints:
    """Cut segments of `counts` consecutive rows into tiles (segment, first row, count) of at most `height` rows."""
    tiles_of = -(-counts // height)
    segment = np.repeat(np.arange(len(counts)), tiles_of)
    first_tile = np.cumsum(tiles_of) - tiles_of
    first_row = np.cumsum(counts) - counts
    offset = (np.arange(len(segment)) - first_tile[segment]) * height
    tiles = np.stack((segment, first_row[segment] + offset, np.minimum(counts[segment] - offset, height)), axis=1)
    return _fill(part, tiles.astype(np.int32))


def _chunk(tiles: Ints, rank_of_segment: Ints, size: int) -> Ints:
    """A tile for every `size` ranks of its segment: (segment, first row, count, first rank)."""
    chunks_of = -(-rank_of_segment[tiles[:, 0]] // size)
    chunk = np.arange(int(chunks_of.sum())) - np.repeat(np.cumsum(chunks_of) - chunks_of, chunks_of)
    items = np.column_stack((np.repeat(tiles, chunks_of, axis=0), chunk * size))
    return items.astype(np.int32)


def _fill(part: Ints, records: Ints) -> Ints:
    part[: records.size] = records.ravel()
    return records
