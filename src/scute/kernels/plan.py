"""Which rows of a batch belong to which adapter: the metadata that the kernels of one step read."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scute.kernels.routes import Route

SMALL_TILE = 16
LARGE_TILE = 64
_SMALL_BATCH = 256

Ints = npt.NDArray[np.int32]


def tile_height(tokens: int) -> int:
    """Rows per tile for a batch of `tokens` rows; small tiles waste less where every adapter has few rows."""
    return SMALL_TILE if tokens <= _SMALL_BATCH else LARGE_TILE


def tile_count(tokens: int, height: int, segments: int) -> int:
    """An upper bound on the tiles that `tokens` rows in at most `segments` segments need."""
    return min(tokens, -(-tokens // height) + segments)


def tiles_for(tokens: int, segments: int, small: Tensor, large: Tensor) -> tuple[Tensor, int, int]:
    """The tile list that serves a batch of `tokens` rows: (tiles, how many of them can be in use, their height)."""
    height = tile_height(tokens)
    tiles = small if height == SMALL_TILE else large
    return tiles, min(tile_count(tokens, height, segments), len(tiles)), height


class BatchPlan:
    """Rows grouped by adapter slot and cut into tiles, at fixed device addresses (CUDA graphs record them).

    Device views, all int32 and all parts of one buffer:
      rows [max_tokens]                   rows of adapters, sorted by slot; base rows are left out
      tiles_small, tiles_large [n, 3]     (slot, first position in `rows`, count), count <= 16 or 64; 0 if unused
      shared_rows [max_tokens]            rows whose slot has a shared pair, sorted by pair
      shared_tiles_small, _large [n, 3]   (pair, first position in `shared_rows`, count)
      slot_of_row [max_tokens]            slot of every row of the batch; -1 for base rows and past the end
    Entries of `rows` and `shared_rows` past the last tile are undefined.

    live: int32 [3] on the CPU, indexed by `Route`. The ops read it when they run, so a compiled graph cannot
    freeze it.
    """

    rows: Tensor
    tiles_small: Tensor
    tiles_large: Tensor
    shared_rows: Tensor
    shared_tiles_small: Tensor
    shared_tiles_large: Tensor
    slot_of_row: Tensor

    def __init__(self, max_tokens: int, slots: int, device: torch.device | str) -> None:
        self.max_tokens = max_tokens
        self.slots = slots
        small = tile_count(max_tokens, SMALL_TILE, slots), 3
        large = tile_count(max_tokens, LARGE_TILE, slots), 3
        self._shapes: dict[str, tuple[int, ...]] = {
            "rows": (max_tokens,),
            "tiles_small": small,
            "tiles_large": large,
            "shared_rows": (max_tokens,),
            "shared_tiles_small": small,
            "shared_tiles_large": large,
            "slot_of_row": (max_tokens,),
        }
        self._sizes = [int(np.prod(shape)) for shape in self._shapes.values()]
        self._device_buffer = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        for name, view in self._split(self._device_buffer).items():
            setattr(self, name, view)
        self.slot_of_row.fill_(-1)
        self.live = torch.zeros(len(Route), dtype=torch.int32)

    def update(
        self,
        slot_of_token: npt.NDArray[np.integer],
        shared_pair_of_slot: npt.NDArray[np.integer],
        rotated: npt.NDArray[np.bool_],
        *,
        force_routes: bool = False,
    ) -> None:
        """Describe the next step: sort on the host, then copy to the device once, without waiting for it.

        slot_of_token [n]: slot of every real row, -1 for the base model. shared_pair_of_slot [slots]: shared
        pair of a slot or -1. rotated [slots]: slots that rotate the input of any layer. force_routes: mark every
        route live, for profiling and graph capture.

        Raises ValueError if there are more rows than `max_tokens` or slots outside -1..slots-1.
        """
        tokens = len(slot_of_token)
        if tokens > self.max_tokens:
            raise ValueError(f"the batch has {tokens} rows but the plan holds {self.max_tokens}")
        # A fresh host buffer: the copy of the last step may still be reading the previous one.
        host_buffer = torch.zeros(self._device_buffer.shape, dtype=torch.int32, pin_memory=self._device_buffer.is_cuda)
        host = {name: view.numpy() for name, view in self._split(host_buffer).items()}

        slot_of_row = np.asarray(slot_of_token, dtype=np.int32)
        host["slot_of_row"][:tokens] = slot_of_row
        host["slot_of_row"][tokens:] = -1
        counts = _group(slot_of_row, host["rows"], self.slots)
        _cut(counts, SMALL_TILE, host["tiles_small"])
        _cut(counts, LARGE_TILE, host["tiles_large"])

        # Index -1 of the appended array is the base model's "no pair".
        pair_of_row = np.append(shared_pair_of_slot, -1).astype(np.int32)[slot_of_row]
        shared_counts = _group(pair_of_row, host["shared_rows"], None)
        _cut(shared_counts, SMALL_TILE, host["shared_tiles_small"])
        _cut(shared_counts, LARGE_TILE, host["shared_tiles_large"])

        self._device_buffer.copy_(host_buffer, non_blocking=True)
        self.live[Route.LOW_RANK] = force_routes or bool(counts.any())
        self.live[Route.SHARED] = force_routes or bool(shared_counts.any())
        self.live[Route.ROTATION] = force_routes or bool(counts[rotated].any())

    def _split(self, buffer: Tensor) -> dict[str, Tensor]:
        parts = torch.split(buffer, self._sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


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


def _cut(counts: npt.NDArray[np.int64], height: int, tiles: Ints) -> None:
    """Cut segments of `counts` consecutive rows into tiles (segment, first row, count) of at most `height` rows."""
    tiles_of = -(-counts // height)
    segment = np.repeat(np.arange(len(counts)), tiles_of)
    first_tile = np.cumsum(tiles_of) - tiles_of
    first_row = np.cumsum(counts) - counts
    offset = (np.arange(len(segment)) - first_tile[segment]) * height
    used = tiles[: len(segment)]
    used[:, 0] = segment
    used[:, 1] = first_row[segment] + offset
    used[:, 2] = np.minimum(counts[segment] - offset, height)
