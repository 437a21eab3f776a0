"""Which rows of a batch belong to which adapter: the metadata that the kernels of one step read."""

from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from scute.kernels.blocks import round_up
from scute.kernels.routes import FUSED_GEMM_TOKENS, SMALL_BATCH, TOGETHER_TOKENS, Part, Route

SMALL_TILE = 16
LARGE_TILE = 32
HEIGHTS = (SMALL_TILE, LARGE_TILE)
PAIR_HEIGHTS = (SMALL_TILE, 64)
"""Rows per tile of a shared pair, by tile height: its ranks are many, so a large tile reads its factors less often."""
RANK_CHUNKS = (16, 64)
"""Ranks of a slot that one work item of the shrink covers, by tile height; a longer rank is shared out over several."""
PAIR_CHUNK = 16
"""Ranks of a pair that one program of a decode batch's shrink covers."""

RANKS = len(Route)
"""Index into `BatchPlan.live`, after the routes."""
UNBOUNDED = 2**30
"""In `BatchPlan.live`: as many tiles as the rows of the launch could have, or as many ranks as a slot may have."""

ALIGNED = 32
"""Every list starts at a multiple of so many integers: tensors that are not aligned are launched the slow way."""

_PLANS: "WeakValueDictionary[int, BatchPlan]" = WeakValueDictionary()

Ints = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]
Records = npt.NDArray[np.int64]
"""[n, 4]: name of a segment (slot, or -1 - pair); its first row; rows; rank."""


def plan_of(buffer: torch.Tensor) -> "BatchPlan":
    """The plan with this buffer. Raises KeyError for a copy of one: nobody would write the next step to it."""
    return _PLANS[buffer.data_ptr()]


def tile_height(tokens: int) -> int:
    """Rows per tile for a batch of `tokens` rows; small tiles waste less where every adapter has few rows."""
    return SMALL_TILE if tokens <= SMALL_BATCH else LARGE_TILE


def size_class(tokens: int) -> tuple[int, bool, bool]:
    """What decides which kernels a batch of `tokens` rows gets: batches of one class get the same."""
    return tile_height(tokens), tokens <= FUSED_GEMM_TOKENS, tokens <= TOGETHER_TOKENS


def tile_count(tokens: int, height: int, segments: int) -> int:
    """An upper bound on the tiles that `tokens` rows in at most `segments` segments need."""
    return min(tokens, -(-tokens // height) + segments) if segments else 0


def shrink_items(tiles: int, max_rank: int, size: int) -> int:
    """An upper bound on the work items of slots in the shrink; size: index of the tiles' height in HEIGHTS."""
    return tiles * -(-max_rank // RANK_CHUNKS[size])


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
      SHARED_TILES_* [n, 3]             (pair, first position in SHARED_ROWS, count), count <= 16 or 64
      SHRINK_* [n, 4]                   (slot, first, count, first rank): some ranks of one of TILES
      ROTATED_* [n, 3]                  the TILES whose slot rotates the input of any layer
    Entries of ROWS and SHARED_ROWS past the last tile are undefined. The small lists of a batch that is too large for
    small tiles (`tile_height`) are empty. Otherwise both are filled: a graph may pad the batch until it is too large.

    live: int32 [4] on the CPU. Three are indexed by `Route`: tiles that the passes of a route have to do at most, 0 if
    it need not run. The last (`RANKS`) is the largest rank of a slot of the batch. The ops read it when they run, so a
    compiled graph cannot freeze it; a CUDA graph is captured with `UNBOUNDED`, and its launches are for the most tiles
    that its rows could have, and for the largest rank of any slot. The ops are given the buffer and find the plan by it
    (`plan_of`): torch.compile takes what an op makes from a tensor of the CPU for misaligned.
    """

    def __init__(self, max_tokens: int, slots: int, pairs: int, max_rank: int, device: torch.device | str) -> None:
        self.max_tokens = max_tokens
        self.slots = slots
        sizes = dict.fromkeys((Part.ROWS, Part.SLOT_OF_ROW, Part.SHARED_ROWS), max_tokens)
        for size, height in enumerate(HEIGHTS):
            tokens = min(max_tokens, SMALL_BATCH) if height == SMALL_TILE else max_tokens
            tiles = tile_count(tokens, height, slots)
            shared_tiles = tile_count(tokens, PAIR_HEIGHTS[size], pairs)
            sizes[Part(Part.TILES_SMALL + size)] = 3 * tiles
            sizes[Part(Part.SHARED_TILES_SMALL + size)] = 3 * shared_tiles
            sizes[Part(Part.SHRINK_SMALL + size)] = 4 * shrink_items(tiles, max_rank, size)
            sizes[Part(Part.ROTATED_SMALL + size)] = 3 * tiles
        self._sizes = [sizes[part] for part in Part]
        *self.offsets, end = [0, *accumulate(round_up(size, ALIGNED) for size in self._sizes)]
        self.buffer = torch.zeros(end, dtype=torch.int32, device=device)
        self._parts = [self.buffer[self._place(part)] for part in Part]
        self.part(Part.SLOT_OF_ROW).fill_(-1)
        self.live = torch.zeros(len(Route) + 1, dtype=torch.int32)
        self._live = self.live.numpy()
        _PLANS[self.buffer.data_ptr()] = self

    def update(
        self, slot_of_token: npt.NDArray[np.integer], residents: Residents, *, force_routes: bool = False
    ) -> None:
        """Describe the next step: sort on the host, then copy to the device once, without waiting for it.

        slot_of_token [n]: slot of every real row, -1 for the base model. force_routes: mark every route live, without
        a bound, for profiling and graph capture.

        A step waits for this, and its time is that of its calls of NumPy more than that of their work: so it makes
        only the lists that a step of so many rows can read.

        Raises ValueError if there are more rows than `max_tokens` or slots outside -1..slots-1.
        """
        tokens = len(slot_of_token)
        if tokens > self.max_tokens:
            raise ValueError(f"the batch has {tokens} rows but the plan holds {self.max_tokens}")
        # A fresh host buffer: the copy of the last step may still be reading the previous one.
        host_buffer = torch.empty(self.buffer.shape, dtype=torch.int32, pin_memory=self.buffer.is_cuda)
        host = host_buffer.numpy()
        host[self.offsets[Part.TILES_SMALL] :] = 0  # all lists after the three of rows
        slot_of_row = host[self._place(Part.SLOT_OF_ROW)]
        slot_of_row[tokens:] = -1
        slot_of_row = slot_of_row[:tokens]
        slot_of_row[:] = slot_of_token

        slots, counts = _group(slot_of_row, host[self._place(Part.ROWS)], self.slots)
        segments = _segments(slots, counts, residents.rank[slots])
        has_pairs = bool((residents.pair[slots] >= 0).any())
        if has_pairs:
            # Index -1 of the appended array is the base model's "no pair".
            pair_of_row = np.append(residents.pair, -1)[slot_of_row]
            pairs, counts = _group(pair_of_row, host[self._place(Part.SHARED_ROWS)], len(residents.pair_rank))
            segments = np.concatenate((segments, _segments(-1 - pairs, counts, residents.pair_rank[pairs])))
        rotated = residents.rotated if residents.rotated[slots].any() else None
        used, most_ranks = [0] * len(Route), int(residents.rank[slots].max(initial=0))
        for size, height in enumerate(HEIGHTS):
            if len(slots) and height >= tile_height(tokens):
                used = [max(pair) for pair in zip(used, self._fill(host, size, segments, rotated), strict=True)]

        self.buffer.copy_(host_buffer, non_blocking=True)
        self._live[:] = UNBOUNDED if force_routes else [*used, most_ranks]

    def part(self, part: Part) -> torch.Tensor:
        """One list of the plan, as a flat view of the device buffer."""
        return self._parts[part]

    def is_live(self, route: Route) -> bool:
        """Whether this step needs the route."""
        return bool(self._live[route])

    def tiles(self, route: Route, bound: int) -> int:
        """Tiles that a launch of the route has to cover; bound: the most that its rows could have."""
        return min(bound, int(self._live[route]))

    def ranks(self, bound: int) -> int:
        """The largest rank that a slot of this step has; bound: the largest that any may have."""
        return min(bound, int(self._live[RANKS]))

    def _place(self, part: int) -> slice:
        start = self.offsets[part]
        return slice(start, start + self._sizes[part])

    def _fill(self, host: Ints, size: int, segments: Records, rotated: npt.NDArray[np.bool_] | None) -> list[int]:
        """Write the lists of one tile height; returns how many tiles each route has.

        rotated: by slot; None if no slot of the batch rotates.
        """
        tiles = _cut(segments, np.where(segments[:, 0] < 0, PAIR_HEIGHTS[size], HEIGHTS[size]))
        own = np.count_nonzero(tiles[:, 0] >= 0)  # the slots' tiles come before the pairs'
        _write(host[self._place(Part.SHRINK_SMALL + size)], _share_ranks(tiles[:own], RANK_CHUNKS[size]))
        own_tiles, shared_tiles = tiles[:own, :3], tiles[own:, :3]
        _write(host[self._place(Part.TILES_SMALL + size)], own_tiles)
        if len(shared_tiles):
            shared_tiles = shared_tiles.copy()  # the segments may be the tiles, and the other height needs them
            shared_tiles[:, 0] = -1 - shared_tiles[:, 0]
            _write(host[self._place(Part.SHARED_TILES_SMALL + size)], shared_tiles)
        turned = own_tiles[:0] if rotated is None else own_tiles[rotated[own_tiles[:, 0]]]
        _write(host[self._place(Part.ROTATED_SMALL + size)], turned)
        return [len(own_tiles), len(shared_tiles), len(turned)]


def _group(keys: Ints, rows: Ints, limit: int) -> tuple[Counts, Counts]:
    """Write the indices of the keys >= 0 to `rows`, stably sorted by key; returns the keys there are, and how often."""
    order = keys.astype(np.int16).argsort(kind="stable")  # of 16 bits: NumPy sorts them in linear time
    if len(order) and keys[order[0]] < -1:
        raise ValueError(f"slot {keys[order[0]]} is below -1")
    counts = np.bincount(keys + 1, minlength=limit + 1)
    if len(counts) > limit + 1:
        raise ValueError(f"slot {len(counts) - 2} is outside the {limit} slots of the plan")
    base_rows = counts[0]
    rows[: len(keys) - base_rows] = order[base_rows:]
    present = counts[1:].nonzero()[0]
    return present, counts[present + 1]


def _segments(names: Counts, counts: Counts, ranks: Ints) -> Records:
    """Records of segments that follow one another."""
    return np.array((names, counts.cumsum() - counts, counts, ranks), dtype=np.int64).T


def _cut(segments: Records, heights: Counts) -> Records:
    """Cut every segment into tiles of at most its height's rows."""
    pieces = -(-segments[:, 2] // heights)
    if pieces.max() == 1:  # as in most decode batches
        return segments
    tiles, number = _repeat(segments, pieces)
    heights = heights.repeat(pieces)
    offset = number * heights
    tiles[:, 1] += offset
    tiles[:, 2] = np.minimum(tiles[:, 2] - offset, heights)
    return tiles


def _share_ranks(tiles: Records, chunk: int) -> Records:
    """Share out the ranks of every tile over items of `chunk` ranks, which have their first rank for a rank."""
    items, number = _repeat(tiles, -(-tiles[:, 3] // chunk))
    items[:, 3] = number * chunk
    return items


def _repeat(records: Records, times: Counts) -> tuple[Records, Counts]:
    """Every record as many times as it says, and the number of each among its copies, from 0."""
    copies = records.repeat(times, axis=0)
    number = np.arange(len(copies)) - (times.cumsum() - times).repeat(times)
    return copies, number


def _write(part: Ints, records: Records) -> None:
    part[: records.size] = records.reshape(-1)
