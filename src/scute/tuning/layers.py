"""Layers of a model with adapters on them, drawn at random: what the kernels are timed on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from scute.costs.layers import LayerShape as LayerShape
from scute.kernels.arguments import Slots
from scute.kernels.arrivals import arrivals_of
from scute.kernels.plan import BatchPlan, Residents
from scute.kernels.routes import FIELDS, UNIT_BYTES, Field, Flag, units_of

POISON = 0xFF
"""Every byte of the arena that no adapter owns; two or four of them are NaN."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What one adapter owns on every slice that it adapts. only: layer name to slices, or None for all of them."""

    rank: int = 0
    scale: bool = False
    shift: bool = False
    shared: bool = False
    rotation_width: int = 0
    only: Mapping[str, tuple[int, ...]] | None = field(default=None, hash=False)

    def adapts(self, shape: LayerShape, slice_index: int) -> bool:
        return self.only is None or slice_index in self.only.get(shape.name, ())


@dataclass(frozen=True, slots=True)
class Pieces:
    """The tensors that one adapter owns on one slice, as views of the arena."""

    a: Tensor | None = None
    b: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    d: Tensor | None = None
    e: Tensor | None = None
    rotation: Tensor | None = None
    """D = R - I, [in / width, width, width]."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the pool: its slots as the ops take them, and what each adapter has on each slice."""

    shape: LayerShape
    slots: Slots
    pieces: Mapping[tuple[int, int], Pieces]


class Pool:
    """Adapters on `copies` layers of every shape, in one arena; slot j holds adapters[j].

    Values are such that every term is of the size of y, and that y stays bounded when an op is applied again and again.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter],
        shapes: Sequence[LayerShape],
        copies: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        shared_rank: int = 256,
        seed: int = 0,
    ) -> None:
        self.adapters = tuple(adapters)
        self.device = torch.device(device)
        self.dtype = dtype
        self.max_rank = max((a.rank for a in adapters), default=0)
        self.shared_rank = shared_rank if any(a.shared for a in adapters) else 0
        self._random = torch.Generator(self.device).manual_seed(seed)
        order = [shape for _ in range(copies) for shape in shapes]
        places, table, size = _lay_out(self.adapters, order, self.shared_rank, dtype.itemsize)
        self.arena = torch.full((size,), POISON, dtype=torch.uint8, device=self.device)
        self.table = torch.from_numpy(table).to(self.device)
        self.shared_a, self.shared_b, self.pair_rank = self._draw_pair(shapes)
        self.layers = list(self._make_layers(order, places))

    def plan(self, max_tokens: int, slot_of_token: Sequence[int]) -> BatchPlan:
        """The plan of a batch whose row i belongs to slot slot_of_token[i]; -1: to the base model."""
        pairs = len(self.pair_rank)
        plan = BatchPlan(max_tokens, len(self.adapters), pairs, self.max_rank, self.device)
        residents = Residents(
            rank=np.array([a.rank for a in self.adapters], dtype=np.int32),
            pair=np.array([0 if a.shared else -1 for a in self.adapters], dtype=np.int32),
            rotated=np.array([a.rotation_width > 0 for a in self.adapters]),
            pair_rank=np.full(pairs, self.shared_rank, dtype=np.int32),
        )
        plan.update(np.asarray(slot_of_token), residents)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return plan

    def _draw_pair(self, shapes: Sequence[LayerShape]) -> tuple[Tensor, Tensor, Tensor]:
        rank, pairs = self.shared_rank, 1 if self.shared_rank else 0
        max_in = max(s.in_features for s in shapes) if pairs else 0
        max_out = max(width for s in shapes for width in s.slices) if pairs else 0
        a = torch.empty(pairs, rank, max_in, dtype=self.dtype, device=self.device)
        b = torch.empty(pairs, rank, max_out, dtype=self.dtype, device=self.device)
        if pairs:
            self._normal(a, max_in**-0.5)
            self._normal(b, rank**-0.5)
        return a, b, torch.full((pairs,), rank, dtype=torch.int32, device=self.device)

    def _make_layers(self, order: Sequence[LayerShape], places: Mapping[tuple[int, int, int], dict[Field, int]]):  # type: ignore[no-untyped-def]
        factors, vectors = self.arena.view(self.dtype), self.arena.view(torch.float32)
        first = 0
        for index, shape in enumerate(order):
            pieces, width = {}, 0
            for slot, adapter in enumerate(self.adapters):
                for i in range(len(shape.slices)):
                    if (place := places.get((index, slot, i))) is not None:
                        pieces[slot, i] = self._draw(shape, adapter, i, place)
                        width = max(width, adapter.rotation_width)
            slots = Slots(
                factors,
                vectors,
                self.table[:, first : first + len(shape.slices)],
                self.shared_a,
                self.shared_b,
                self.pair_rank,
                arrivals_of(len(shape.slices), shape.out_features, self.shared_a),
                shape.starts,
                [0] * len(shape.slices),
                0,
                self.max_rank,
                width,
            )
            first += len(shape.slices)
            yield Layer(shape, slots, pieces)

    def _draw(self, shape: LayerShape, adapter: Adapter, slice_index: int, place: Mapping[Field, int]) -> Pieces:
        wide = shape.in_features
        drawn: dict[str, Tensor] = {}
        for name, at, sizes, of in _pieces(shape, adapter, slice_index, self.shared_rank):
            arena = self.arena.view(self.dtype if of == "factor" else torch.float32)
            start = place[at] * (UNIT_BYTES // arena.element_size())
            drawn[name] = arena[start : start + int(np.prod(sizes))].view(sizes)
        for name, deviation in (("a", wide**-0.5), ("b", max(adapter.rank, 1) ** -0.5), ("shift", 1.0), ("e", 1.0)):
            if name in drawn:
                self._normal(drawn[name], deviation)
        if "scale" in drawn:  # far from one, and below it: repeated scaling must not overflow
            drawn["scale"].uniform_(0.5, 0.95, generator=self._random)
        if "d" in drawn:
            self._normal(drawn["d"], 0.3).add_(1)
        if "rotation" in drawn:
            self._normal(drawn["rotation"], 0.5 * adapter.rotation_width**-0.5)
        return Pieces(**drawn)

    def _normal(self, tensor: Tensor, deviation: float) -> Tensor:
        return tensor.normal_(0.0, deviation, generator=self._random)


def _pieces(
    shape: LayerShape, adapter: Adapter, slice_index: int, shared_rank: int
) -> Iterator[tuple[str, Field, tuple[int, ...], str]]:
    """(attribute of `Pieces`, field of the table, shape, "factor" or "vector") of everything owned on a slice."""
    wide, out, rank, width = shape.in_features, shape.slices[slice_index], adapter.rank, adapter.rotation_width
    if rank:
        yield "a", Field.A, (rank, wide), "factor"
        yield "b", Field.B, (rank, out), "factor"
    if adapter.scale:
        yield "scale", Field.SCALE, (out,), "vector"
    if adapter.shift:
        yield "shift", Field.SHIFT, (out,), "vector"
    if adapter.shared:
        yield "d", Field.D, (shared_rank,), "vector"
        yield "e", Field.E, (out,), "vector"
    if width:
        yield "rotation", Field.ROTATION, (wide // width, width, width), "factor"


def _lay_out(
    adapters: Sequence[Adapter], order: Sequence[LayerShape], shared_rank: int, itemsize: int
) -> tuple[dict[tuple[int, int, int], dict[Field, int]], np.ndarray, int]:
    """One extent an adapter, its pieces back to back in units: (places by (layer, slot, slice), table, bytes)."""
    table = np.zeros((len(adapters), sum(len(s.slices) for s in order), FIELDS), dtype=np.int32)
    places: dict[tuple[int, int, int], dict[Field, int]] = {}
    unit = 1  # the first unit belongs to nobody: an offset of zero is a mistake that shows
    for slot, adapter in enumerate(adapters):
        column = 0
        for index, shape in enumerate(order):
            for i in range(len(shape.slices)):
                entry = table[slot, column]
                column += 1
                if not adapter.adapts(shape, i):
                    continue
                place: dict[Field, int] = {}
                for _, at, sizes, of in _pieces(shape, adapter, i, shared_rank):
                    place[at] = entry[at] = unit
                    unit += units_of(int(np.prod(sizes)) * (itemsize if of == "factor" else 4))
                places[index, slot, i] = place
                entry[Field.RANK] = adapter.rank
                entry[Field.WIDTH] = adapter.rotation_width
                entry[Field.FLAGS] = (
                    Flag.SCALE * adapter.scale
                    | Flag.SHIFT * adapter.shift
                    | Flag.SHARED * adapter.shared
                    | Flag.ROTATION * (adapter.rotation_width > 0)
                )
    return places, table, (unit + 1) * UNIT_BYTES
