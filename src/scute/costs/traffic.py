"""Bytes that the adapter work of a step moves, by route, and its launches (paper, section 4.1 and appendix A)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from scute.costs.layers import LayerShape
from scute.costs.slots import Counting, Piece, Slots


class Route(StrEnum):
    """How a live slot is computed. ACTIVATIONS is no route: x and y, which the routes of a layer have in common."""

    LOW_RANK = "low-rank"
    SCALE = "scale"
    SHARED = "shared pair"
    ROTATION = "rotation"
    ACTIVATIONS = "x and y"


ROUTE_OF = {
    Piece.A: Route.LOW_RANK,
    Piece.B: Route.LOW_RANK,
    Piece.SCALE: Route.SCALE,
    Piece.SHIFT: Route.SCALE,
    Piece.D: Route.SHARED,
    Piece.E: Route.SHARED,
    Piece.PAIR: Route.SHARED,
    Piece.ROTATION: Route.ROTATION,
}

Use = tuple[Sequence[Slots | None], int]
"""An adapter's slots on every slice of a layer, and its rows in the batch."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """bytes: read and written, by route; launches: kernels."""

    bytes: Mapping[Route, int] = field(default_factory=Counter)
    launches: int = 0

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __add__(self, other: Self) -> Self:
        total = Counter(self.bytes)
        total.update(other.bytes)
        return type(self)(total, self.launches + other.launches)


def layer_bytes(shape: LayerShape, uses: Iterable[Use], counting: Counting) -> Counter[Route]:
    """Bytes of one layer and step, each counted once however many rows or tiles need it.

    Read: what the adapters of the batch own, the shared pairs, x of rows that a term or a rotation needs. Read and
    written: the slices of y that an adapter changes. Written: rotated rows, for every slice. Omitted: partial sums,
    table and plan. An adapter without rows counts for nothing.
    """
    total: Counter[Route] = Counter()
    pairs: dict[tuple[str, int], dict[int, int]] = {}
    for slots, rows in uses:
        used = [(i, own, out) for i, (own, out) in enumerate(zip(slots, shape.slices, strict=True)) if own is not None]
        if not rows:
            continue
        for index, own, out in used:
            for piece, size in own.bytes_owned(shape.in_features, out, counting).items():
                total[ROUTE_OF[piece]] += size
            if own.pair is not None:
                pairs.setdefault((own.pair, own.shared_rank), {})[index] = out
            if counting.activations:
                elements = shape.in_features * bool(own.rotation_width) + 2 * out * own.changes_output
                total[Route.ACTIVATIONS] += counting.factor * rows * elements
        if counting.activations and any(own.reads_input for _, own, _ in used):
            total[Route.ACTIVATIONS] += counting.factor * rows * shape.in_features
    for (_, rank), widths in pairs.items():
        columns = sum(widths.values()) if counting.pair_by_slice else max(widths.values())
        total[Route.SHARED] += counting.factor * rank * (shape.in_features + columns)
    return +total


def live_routes(uses: Iterable[Use]) -> frozenset[Route]:
    """The routes that the adapters with rows need on these slices."""
    found = set()
    for slots, rows in uses:
        for own in slots if rows else ():
            if own is not None:
                found |= {ROUTE_OF[piece] for piece, n in own.elements(1, 1).items() if n}
    return frozenset(found)
