"""Batches of adapters for the kernel tests, with the result of every op worked out row by row in float64.

Everything that an op must not read is NaN: the arena between the pieces, shared factors past their rank, rows of x
past the real batch. Entries of the plan that no tile covers hold a row number far outside every tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from scute.kernels.arrivals import arrivals_of
from scute.kernels.plan import BatchPlan, Residents
from scute.kernels.routes import FIELDS, UNIT_BYTES, Field, Flag, Part

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
FAR_ROW = 2**30


@dataclass(frozen=True)
class Adapter:
    """One slot: per slice a rank, then which vectors it has, its shared pair and the slices that use it, its widths."""

    ranks: tuple[int, ...] = ()
    scale: bool = False
    shift: bool = False
    pair: int = -1
    shared_slices: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Spec:
    name: str
    in_features: int
    slices: tuple[int, ...]
    adapters: tuple[Adapter, ...]
    slot_of_token: tuple[int, ...]
    padding: int = 0
    pair_ranks: tuple[int, ...] = (1,)
    in_offset: int = 0

    def __str__(self) -> str:
        return self.name


@dataclass
class Case:
    """The tensors of one layer and one batch, named as the parameters of the ops, and the float64 truth."""

    spec: Spec
    plan: BatchPlan
    x: Tensor
    y: Tensor
    layer: dict[str, Tensor | int | list[int]]
    weight: Tensor
    bias: Tensor
    truth: "Truth" = field(repr=False)

    def common(self) -> tuple:
        """The parameters that every op ends with."""
        return (*self.layer.values(), self.plan.buffer)

    def adapt_args(self, y: Tensor) -> tuple:
        return (y, self.x, *self.common())

    def rotate_args(self) -> tuple:
        return (self.x, *self.common())

    def linear_args(self) -> tuple:
        return (self.x, self.weight, self.bias, *self.common())


@dataclass
class Truth:
    """The normal form of every slot and slice, unpacked and in float64, and what it does to single rows.

    blocks: R - I of every rotation block, [in / width, width, width].
    """

    spec: Spec
    x: Tensor
    y: Tensor
    factors: dict[tuple[int, int], tuple[Tensor, Tensor]]
    scale: dict[tuple[int, int], Tensor]
    shift: dict[tuple[int, int], Tensor]
    shared: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]]
    blocks: dict[tuple[int, int], Tensor]

    def adapt(self) -> Tensor:
        y = self.y.clone()
        for row, slot, i, columns in self._rows():
            member = slot, i
            if member in self.scale:
                y[row, columns] *= self.scale[member]
            if member in self.shift:
                y[row, columns] += self.shift[member]
            if member in self.factors:
                a, b = self.factors[member]
                y[row, columns] += (self.x[row] @ a) @ b
            if member in self.shared:
                a, b, d, e = self.shared[member]
                y[row, columns] += (((self.x[row] @ a) * d) @ b) * e
        return y

    def rotate(self) -> Tensor:
        out = self.x.repeat(len(self.spec.slices), 1, 1)
        for row, slot, i, _ in self._rows():
            if (slot, i) in self.blocks:
                difference = self.blocks[slot, i]
                x = self.x[row].view(difference.shape[:2])
                out[i, row] = (x + torch.einsum("ni,nij->nj", x, difference)).flatten()
        return out

    def absolute(self) -> "Truth":
        """The same members with every value replaced by its absolute value: an op of it bounds all terms of a sum."""

        def positive(value):
            return tuple(v.abs() for v in value) if isinstance(value, tuple) else value.abs()

        members = (self.factors, self.scale, self.shift, self.shared, self.blocks)
        tables = [{member: positive(value) for member, value in table.items()} for table in members]
        return Truth(self.spec, self.x.abs(), self.y.abs(), *tables)

    def touched(self) -> Tensor:
        """Which elements of y `adapt` changes: bool [T, out]."""
        members = self.factors.keys() | self.scale.keys() | self.shift.keys() | self.shared.keys()
        mask = torch.zeros(self.y.shape, dtype=torch.bool)
        for row, slot, i, columns in self._rows():
            mask[row, columns] = (slot, i) in members
        return mask

    def _rows(self):
        starts = np.cumsum((0, *self.spec.slices))
        for row, slot in enumerate(self.spec.slot_of_token):
            if slot >= 0:
                for i in range(len(self.spec.slices)):
                    yield row, slot, i, slice(starts[i], starts[i + 1])


def build(spec: Spec, dtype: torch.dtype, device: str = DEVICE, seed: int = 0) -> Case:
    random = torch.Generator().manual_seed(seed)
    wide = torch.float64

    def normal(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=wide).to(to)

    slots, slices = len(spec.adapters) + 2, len(spec.slices)  # the last two slots are never used
    starts = [0, *np.cumsum(spec.slices).tolist()]
    in_features, out = spec.in_features, starts[-1]
    tokens = len(spec.slot_of_token)

    x = normal(tokens + spec.padding, in_features)
    x[tokens:] = NAN
    y = normal(tokens + spec.padding, out)
    y[tokens:] = NAN
    truth = Truth(spec, x.to(wide), y.to(wide), {}, {}, {}, {}, {})

    arena = Arena(dtype)
    table = torch.full((slots, slices, FIELDS), FAR_ROW, dtype=torch.int32)
    table[..., Field.RANK] = table[..., Field.FLAGS] = table[..., Field.WIDTH] = 0

    pairs, shared_rank = len(spec.pair_ranks), max(spec.pair_ranks)
    out_offsets = [3 * i for i in range(slices)]
    shared_a = torch.full((pairs, shared_rank, spec.in_offset + in_features + 2), NAN, dtype=dtype)
    shared_b = torch.full((pairs, shared_rank, out + 3 * slices), NAN, dtype=dtype)
    for pair, rank in enumerate(spec.pair_ranks):
        used = slice(spec.in_offset, spec.in_offset + in_features)
        shared_a[pair, :rank, used] = normal(rank, in_features) / in_features**0.5
        for i, offset in enumerate(out_offsets):
            shared_b[pair, :rank, offset : offset + spec.slices[i]] = normal(rank, spec.slices[i]) / rank**0.5

    for slot, adapter in enumerate(spec.adapters):
        for i in range(slices):
            entry, member, flags, out_slice = table[slot, i], (slot, i), 0, spec.slices[i]
            rank = adapter.ranks[i] if adapter.ranks else 0
            if rank:
                a, b = normal(rank, in_features) / in_features**0.5, normal(rank, out_slice) / rank**0.5
                entry[Field.RANK], entry[Field.A], entry[Field.B] = rank, arena.put(a), arena.put(b)
                truth.factors[member] = a.T.to(wide), b.to(wide)
            if adapter.scale:
                flags |= Flag.SCALE
                scale = 1 + 0.3 * normal(out_slice, to=torch.float32)
                entry[Field.SCALE], truth.scale[member] = arena.put(scale), scale.to(wide)
            if adapter.shift:
                flags |= Flag.SHIFT
                shift = normal(out_slice, to=torch.float32)
                entry[Field.SHIFT], truth.shift[member] = arena.put(shift), shift.to(wide)
            if i in adapter.shared_slices:
                flags |= Flag.SHARED
                rank_of_pair, offset = spec.pair_ranks[adapter.pair], out_offsets[i]
                vectors = normal(rank_of_pair, to=torch.float32), normal(out_slice, to=torch.float32)
                entry[Field.D], entry[Field.E] = (arena.put(vector) for vector in vectors)
                entry[Field.PAIR] = adapter.pair
                pair_a = shared_a[adapter.pair, :rank_of_pair, spec.in_offset : spec.in_offset + in_features].T
                pair_b = shared_b[adapter.pair, :rank_of_pair, offset : offset + out_slice]
                truth.shared[member] = tuple(tensor.to(wide) for tensor in (pair_a, pair_b, *vectors))
            if adapter.widths and adapter.widths[i]:
                flags |= Flag.ROTATION
                w = adapter.widths[i]
                difference = normal(in_features // w, w, w) * 0.5 / w**0.5
                entry[Field.WIDTH], entry[Field.ROTATION] = w, arena.put(difference)
                truth.blocks[member] = difference.to(wide)
            entry[Field.FLAGS] = flags

    data = arena.data().to(device)
    max_rank = max((max(adapter.ranks, default=0) for adapter in spec.adapters), default=0)
    layer = {
        "factors": data.view(dtype),
        "vectors": data.view(torch.float32),
        "table": table.to(device),
        "shared_a": shared_a.to(device),
        "shared_b": shared_b.to(device),
        "pair_rank": torch.tensor(spec.pair_ranks, dtype=torch.int32, device=device),
        "arrivals": arrivals_of(len(spec.slices), out, shared_a.to(device)),
        "slice_starts": starts,
        "out_offsets": out_offsets,
        "in_offset": spec.in_offset,
        "max_rank": max_rank,
        "rotation_width": max((w for adapter in spec.adapters for w in adapter.widths), default=0),
    }
    return Case(
        spec,
        build_plan(spec, slots, max_rank, device),
        x.to(device),
        y.to(device),
        layer,
        (normal(out, in_features) / in_features**0.5).to(device),
        normal(out).to(device),
        truth,
    )


class Arena:
    """Pieces one after the other, NaN between them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.parts = [torch.full((UNIT_BYTES,), 255, dtype=torch.uint8)]

    def put(self, piece: Tensor) -> int:
        """Append a piece; returns the unit where it starts."""
        unit = sum(len(part) for part in self.parts) // UNIT_BYTES
        piece = piece.contiguous().flatten().view(torch.uint8)
        padding = torch.full((-len(piece) % UNIT_BYTES + UNIT_BYTES,), 255, dtype=torch.uint8)
        self.parts += [piece, padding]
        return unit

    def data(self) -> Tensor:
        return torch.cat(self.parts)


def build_plan(spec: Spec, slots: int, max_rank: int, device: str) -> BatchPlan:
    tokens, pairs = len(spec.slot_of_token), len(spec.pair_ranks)
    plan = BatchPlan(tokens + spec.padding + 5, slots, pairs, max_rank, device)
    residents = Residents.none(slots, pairs)
    residents.pair_rank[:] = spec.pair_ranks
    for slot, adapter in enumerate(spec.adapters):
        residents.rank[slot] = max(adapter.ranks, default=0)
        residents.pair[slot] = adapter.pair
        residents.rotated[slot] = any(adapter.widths)
    slot_of_token = np.array(spec.slot_of_token, dtype=np.int32)
    plan.update(slot_of_token, residents)
    pair_of_row = np.append(residents.pair, -1)[slot_of_token]
    for part, rows in ((Part.ROWS, slot_of_token), (Part.SHARED_ROWS, pair_of_row)):
        first, end = (plan.offsets[p] for p in (part, part + 1))
        plan.buffer[first + int((rows >= 0).sum()) : end] = FAR_ROW
    return plan


def assert_true(actual: Tensor, truth: Truth, op: Callable[[Truth], Tensor]) -> None:
    """The real rows of `actual` hold what `op` of the truth gives."""
    real = slice(0, len(truth.spec.slot_of_token))
    assert_close(actual[..., real, :], op(truth)[..., real, :], op(truth.absolute())[..., real, :])


def assert_close(actual: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """`actual` is `exact` rounded once to its dtype, give or take what the sums before that can lose.

    magnitude: the sum of the absolute values of all terms. A sum loses about 2**-20 of it in float32, and 2**-17 where
    a shrunk row enters the expand as two bfloat16 parts.
    """
    finfo = torch.finfo(actual.dtype)
    bits = {torch.float64: 48, torch.float32: 20, torch.float16: 20, torch.bfloat16: 17}[actual.dtype]
    half_ulp = finfo.eps / 2 * exact.abs().clamp(min=finfo.tiny)
    bound = half_ulp + 2.0**-bits * magnitude
    error = (actual.cpu().double() - exact).abs()
    wrong = ~(error <= bound)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} wrong, worst ratio {(error / bound).max():.2f}"


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    assert torch.equal(actual.contiguous().view(integers).cpu(), expected.contiguous().view(integers).cpu())


def mixed_pool(slices: int, ranks: tuple[int, int, int] = (3, 17, 8)) -> tuple[Adapter, ...]:
    """Eight slots: every combination that the low-rank and the shared pass treat differently."""
    low, high, middle = ranks
    first_only = (middle,) + (0,) * (slices - 1)
    everywhere = tuple(range(slices))
    return (
        Adapter(ranks=(low,) * slices),
        Adapter(ranks=(high,) * slices, scale=True),
        Adapter(scale=True),
        Adapter(ranks=first_only, shift=True),
        Adapter(pair=0, shared_slices=everywhere),
        Adapter(ranks=(1,) * slices, scale=True, shift=True, pair=1, shared_slices=(0,)),
        Adapter(pair=1, shared_slices=everywhere, scale=True),
        Adapter(),
    )


def batch(tokens: int, slots: int, seed: int = 0) -> tuple[int, ...]:
    """Random slots from -1 (base) to slots - 1."""
    return tuple(np.random.default_rng(seed).integers(-1, slots, tokens).tolist())


def _projection(name: str, in_features: int, slices: tuple[int, ...], slot_of_token: tuple[int, ...], **rest) -> Spec:
    rest.setdefault("adapters", mixed_pool(len(slices)))
    rest.setdefault("pair_ranks", (5, 12))
    return Spec(name, in_features, slices, slot_of_token=slot_of_token, **rest)


PROJECTIONS = [
    _projection("empty", 19, (7,), ()),
    _projection("all-base", 19, (7,), (-1, -1, -1), padding=1),
    _projection("one-token", 19, (7,), (1,)),
    _projection("one-slice", 19, (7,), batch(20, 8), in_offset=3),
    _projection("qkv", 19, (8, 4, 4), batch(30, 8, 1)),
    _projection("gate-up-padded", 19, (13, 5), batch(25, 8, 2), padding=7),
    _projection("many-tiles-per-slot", 19, (13, 5), (1,) * 40 + (6,) * 17 + (-1,) * 2 + (5,) * 33),
    _projection("aligned-slices", 48, (32, 16), batch(24, 8, 3)),
    _projection("many-columns", 600, (130, 20), batch(9, 8, 4), in_offset=1),
    _projection("high-rank", 19, (8, 4), batch(12, 8, 5), adapters=mixed_pool(2, (20, 70, 8)), pair_ranks=(40, 90)),
    _projection("no-rank", 19, (7,), (0, -1, 0), adapters=(Adapter(scale=True, shift=True),)),
    _projection("large-tiles", 19, (8, 4, 4), batch(280, 8, 6) + (1,) * 70, padding=3),
    _projection("large-tiles-high-rank", 70, (8, 4, 4), batch(260, 8, 7) + (4,) * 99, pair_ranks=(300, 140), padding=3),
]

ROTATIONS = [
    Spec(
        "mixed-widths",
        48,
        (8, 4, 4),
        (Adapter(widths=(1, 3, 8)), Adapter(ranks=(2, 2, 2)), Adapter(widths=(16, 0, 24)), Adapter(widths=(0, 6, 48))),
        batch(30, 4),
    ),
    Spec("diagonal-odd", 19, (7,), (Adapter(widths=(1,)), Adapter(widths=(19,))), batch(10, 2), padding=4),
    Spec("wider-than-block", 192, (8, 4), (Adapter(widths=(96, 3)), Adapter(widths=(24, 64))), batch(20, 2)),
    Spec("widest", 160, (8, 4), (Adapter(widths=(32, 4)), Adapter(widths=(32, 32))), batch(40, 2), padding=3),
    Spec("no-rotation", 24, (5,), (Adapter(ranks=(2,)),), batch(6, 1)),
    Spec("empty", 24, (5,), (Adapter(widths=(8,)),), ()),
    Spec("all-base", 24, (5,), (Adapter(widths=(8,)),), (-1, -1)),
    Spec("large-tiles", 40, (6,), (Adapter(widths=(8,)), Adapter(widths=(5,))), batch(270, 2) + (1,) * 70, padding=2),
]

EVERYTHING = (
    *mixed_pool(3),
    Adapter(widths=(8, 0, 16)),
    Adapter(ranks=(4, 0, 9), scale=True, widths=(16, 16, 16), pair=0, shared_slices=(1,)),
    Adapter(widths=(16, 16, 16)),
)
TOGETHER = [
    Spec("few-rows", 48, (16, 8, 8), EVERYTHING, batch(40, 11), padding=3, pair_ranks=(5, 12)),
    Spec("many-rows", 48, (16, 8, 8), EVERYTHING, batch(300, 11), padding=3, pair_ranks=(5, 12)),
    Spec("one-slice", 32, (13,), (*mixed_pool(1), Adapter(widths=(8,))), batch(30, 9), pair_ranks=(5, 12)),
]
