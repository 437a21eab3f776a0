"""What an adapter has on one slice of one layer, as sizes alone, and the bytes of each of its pieces."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Self

from scute.kernels.routes import UNIT_BYTES, units_of

if TYPE_CHECKING:
    from scute.algebra.form import Member


class Piece(StrEnum):
    """The tensors of an adapter, by their names in the formula; PAIR: the factors that it shares with others."""

    A = "a"
    B = "b"
    SCALE = "scale"
    SHIFT = "shift"
    D = "d"
    E = "e"
    ROTATION = "rotation"
    PAIR = "pair"


VECTORS = frozenset({Piece.SCALE, Piece.SHIFT, Piece.D, Piece.E})


class Counting(NamedTuple):
    """What a count includes.

    factor: bytes of an element of A, B, R and pairs, and of x and y; vector: of an element of s, b, d and e.
    activations: whether x and y count. pair_by_slice: whether the leading columns of a shared B count for every
    slice that uses them, or once a layer.
    """

    factor: int = 2
    vector: int = 4
    activations: bool = True
    pair_by_slice: bool = False

    def bytes_of(self, piece: Piece, elements: int) -> int:
        return elements * (self.vector if piece in VECTORS else self.factor)


PAPER = Counting(vector=2, activations=False, pair_by_slice=True)
"""As the paper's tables count: adapter tensors alone, all of them in half precision."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots that an adapter has on one slice; all that are left at their default are the identity.

    rank: of the terms that it owns. pair: key of its shared factors, of rank shared_rank, or None.
    """

    rank: int = 0
    scale: bool = False
    shift: bool = False
    rotation_width: int = 0
    pair: str | None = None
    shared_rank: int = 0

    @classmethod
    def of(cls, member: "Member", base_has_bias: bool) -> Self:
        """Raises ValueError for a member with two terms on shared factors, which is not served."""
        pairs = [term.pair for term in member.terms if term.pair is not None]
        if len(pairs) > 1:
            raise ValueError("two shared terms on one projection are not served")
        bias, scales = member.bias, member.scale is not None or member.magnitude is not None
        own = any(part is not None for part in (bias.replaced, bias.shift, bias.factor))
        return cls(
            rank=member.rank,
            scale=scales,
            shift=own or (base_has_bias and scales and not bias.scaled),
            rotation_width=0 if member.rotation is None else member.rotation.width,
            pair=pairs[0].key if pairs else None,
            shared_rank=pairs[0].rank if pairs else 0,
        )

    @property
    def reads_input(self) -> bool:
        """Whether something but the base GEMM reads x."""
        return bool(self.rank or self.rotation_width or self.shared_rank)

    @property
    def changes_output(self) -> bool:
        """Whether an expand reads y and writes it."""
        return bool(self.rank or self.scale or self.shift or self.shared_rank)

    def elements(self, in_features: int, out_features: int) -> dict[Piece, int]:
        """Of every piece that the adapter owns; 0 for what it does not have."""
        return {
            Piece.A: self.rank * in_features,
            Piece.B: self.rank * out_features,
            Piece.SCALE: self.scale * out_features,
            Piece.SHIFT: self.shift * out_features,
            Piece.D: self.shared_rank,
            Piece.E: out_features if self.shared_rank else 0,
            Piece.ROTATION: self.rotation_width * in_features,
        }

    def bytes_owned(self, in_features: int, out_features: int, counting: Counting) -> Counter[Piece]:
        """Of every piece, as the tensors hold them."""
        pieces = self.elements(in_features, out_features).items()
        return Counter({piece: counting.bytes_of(piece, n) for piece, n in pieces if n})


def room(pieces: Iterable[tuple[Piece, int]]) -> Counter[Piece]:
    """Bytes that pieces take in the arena, where each starts at a unit; pieces: with their own bytes."""
    taken: Counter[Piece] = Counter()
    for piece, size in pieces:
        taken[piece] += units_of(size) * UNIT_BYTES
    return taken
