"""The device buffers of the slots: one set for each wrapped layer, and what the whole model has once.

Everything is allocated once, while vLLM loads the model, so that its memory profile counts it, and never moves,
so that CUDA graphs may hold the addresses. Identity of a slot is said by the layer's table, not by the values.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scute.algebra.form import SharedPair
from scute.errors import Code, Refusal
from scute.kernels.routes import Flag


@dataclass(frozen=True, slots=True, eq=False)
class SliceSlots:
    """What one adapter puts into one output slice of one layer on this rank; host tensors, ready to copy.

    a: [rank, in], b: [rank, out] in the LoRA dtype, or None. scale, shift, e: [out] float32 or None.
    d: [shared rank] float32 or None (d and e come together). rotation: [in * width], R - I in the LoRA dtype.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    d: Tensor | None = None
    e: Tensor | None = None
    rotation: Tensor | None = None
    width: int = 0

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[0]

    def table_entry(self) -> tuple[int, int]:
        """(rank, flags), as the kernels read it."""
        present = {
            Flag.SCALE: self.scale,
            Flag.SHIFT: self.shift,
            Flag.SHARED: self.e,
            Flag.ROTATION: self.rotation,
        }
        flags = sum(flag for flag, tensor in present.items() if tensor is not None)
        return self.rank, flags


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits that every layer's buffers are made for."""

    slots: int
    max_rank: int
    rotation_width: int
    shared_rank: int
    dtype: torch.dtype
    device: torch.device


class LayerSlots:
    """The slot buffers of one wrapped layer (names and layouts as in `scute.kernels`)."""

    def __init__(self, sizes: Sizes, in_features: int, slices: Sequence[int], has_shared: bool) -> None:
        self.sizes = sizes
        self.slices = tuple(slices)
        self.starts = starts = [0, *itertools.accumulate(slices)]
        self.max_slice = max(slices)
        total, count, rows = starts[-1], len(self.slices), sizes.slots * sizes.max_rank

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=sizes.device)

        self.a = zeros(count, rows, in_features, dtype=sizes.dtype)
        self.b = zeros(rows, total, dtype=sizes.dtype)
        self.scale, self.shift = zeros(sizes.slots, total), zeros(sizes.slots, total)
        self.table = zeros(sizes.slots, count, 2, dtype=torch.int32)
        self.slice_starts = torch.tensor(starts, dtype=torch.int32, device=sizes.device)
        self.width = zeros(sizes.slots, count, dtype=torch.int32)
        self.rotation = (
            zeros(sizes.slots, count, in_features * sizes.rotation_width, dtype=sizes.dtype)
            if sizes.rotation_width
            else None
        )
        self.d = zeros(sizes.slots, count, sizes.shared_rank) if has_shared else None
        self.e = zeros(sizes.slots, total) if has_shared else None

    def clear(self, slot: int) -> None:
        """Make the slot the identity: kernels read nothing of it."""
        self.table[slot].zero_()
        self.width[slot].zero_()

    def mark(self, slot: int, rank: int) -> None:
        """Give the slot plain factors of `rank` on every slice, and nothing else; their values stay as they are."""
        self.table[slot, :, 0] = rank
        self.table[slot, :, 1] = 0
        self.width[slot].zero_()

    def write(self, slot: int, pieces: Sequence[SliceSlots | None]) -> None:
        """Copy an adapter's pieces, one a slice, into the slot; stream-ordered after the batch that used it last."""
        entries, widths = [], []
        for index, piece in enumerate(pieces):
            entries.append((0, 0) if piece is None else piece.table_entry())
            widths.append(0 if piece is None else piece.width)
            if piece is not None:
                self._write_slice(slot, index, piece)
        self.table[slot].copy_(torch.tensor(entries, dtype=torch.int32))
        self.width[slot].copy_(torch.tensor(widths, dtype=torch.int32))

    def _write_slice(self, slot: int, index: int, piece: SliceSlots) -> None:
        columns = slice(self.starts[index], self.starts[index + 1])
        if piece.a is not None and piece.b is not None:
            first = slot * self.sizes.max_rank
            rows = slice(first, first + piece.rank)
            self.a[index, rows].copy_(piece.a, non_blocking=True)
            self.b[rows, columns].copy_(piece.b, non_blocking=True)
        if piece.scale is not None:
            self.scale[slot, columns].copy_(piece.scale, non_blocking=True)
        if piece.shift is not None:
            self.shift[slot, columns].copy_(piece.shift, non_blocking=True)
        if piece.d is not None and self.d is not None:
            self.d[slot, index, : piece.d.shape[0]].copy_(piece.d, non_blocking=True)
        if piece.e is not None and self.e is not None:
            self.e[slot, columns].copy_(piece.e, non_blocking=True)
        if piece.rotation is not None and self.rotation is not None:
            self.rotation[slot, index, : piece.rotation.shape[0]].copy_(piece.rotation, non_blocking=True)


class SharedPairs:
    """The resident pairs of shared factors, counted by the adapters that use them."""

    def __init__(self, sizes: Sizes, pairs: int, max_in: int, max_out: int) -> None:
        self.max_in, self.max_out = max_in, max_out
        self.a = torch.zeros(pairs, sizes.shared_rank, max_in, dtype=sizes.dtype, device=sizes.device)
        self.b = torch.zeros(pairs, sizes.shared_rank, max_out, dtype=sizes.dtype, device=sizes.device)
        self.rank = torch.zeros(pairs, dtype=torch.int32, device=sizes.device)
        self._keys: list[str | None] = [None] * pairs
        self._users: list[set[int]] = [set() for _ in range(pairs)]

    def check_fits(self, pair: SharedPair) -> None:
        """Raises Refusal if the pair is larger than the places are."""
        limit = self.a.shape[1]
        if pair.rank > limit:
            raise Refusal(
                Code.CAPACITY_SHARED,
                f"VeRA rank {pair.rank} is greater than shared_rank {limit}; raise it in additional_config['scute'].",
            )
        if pair.a.shape[0] > self.max_in or pair.b.shape[1] > self.max_out:
            raise Refusal(
                Code.TENSOR_SHAPE,
                f"the VeRA projections are made for layers of {pair.a.shape[0]} inputs and {pair.b.shape[1]} outputs, "
                f"but this base model has at most {self.max_in} and {self.max_out}; was the adapter trained on it?",
            )

    def has_room_for(self, pair: SharedPair, adapter_id: int) -> bool:
        """Whether the pair is resident or has a place; what `adapter_id` holds alone counts as free."""
        return pair.key in self._keys or any(users <= {adapter_id} for users in self._users)

    def acquire(self, pair: SharedPair, adapter_id: int) -> None:
        """Make the pair resident if it is not; the adapter holds its place until `release`."""
        if pair.key in self._keys:
            place = self._keys.index(pair.key)
        else:
            place = next(i for i, users in enumerate(self._users) if not users)
            self._keys[place] = pair.key
            self.a[place, : pair.rank, : pair.a.shape[0]].copy_(pair.a.T)
            self.b[place, : pair.rank, : pair.b.shape[1]].copy_(pair.b)
            self.rank[place : place + 1].copy_(torch.tensor([pair.rank], dtype=torch.int32))
        self._users[place].add(adapter_id)

    def place_of(self, key: str) -> int:
        """Place of a pair that some adapter holds."""
        return self._keys.index(key)

    def release(self, adapter_id: int) -> None:
        for users in self._users:
            users.discard(adapter_id)
