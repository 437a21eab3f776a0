"""Device memory follows what adapters own: a pool at the shapes of Llama-3.1-8B, on the meta device."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from scute.algebra.form import Member, Owner, Rotation, SharedPair, Term
from scute.engine.arena import Arena
from scute.engine.capacity import LayerShape, Limits, largest_batch
from scute.engine.options import Options
from scute.engine.packing import pack
from scute.engine.pairs import SharedPairs
from scute.engine.pieces import SliceSlots
from scute.kernels.plan import BatchPlan
from scute.kernels.routes import UNIT_BYTES

LAYERS, SLOTS, ROWS, META = 32, 1040, 8192, torch.device("meta")
INPUTS = {"qkv": 4096, "o": 4096, "gate_up": 4096, "down": 14336}
SLICES = {"qkv": (4096, 1024, 1024), "o": (4096,), "gate_up": (14336, 14336), "down": (4096,)}
SHAPES = [LayerShape(INPUTS[name], SLICES[name], rotates=True, shares=True) for name in SLICES] * LAYERS
OPTIONS = Options()
LIMITS = Limits(512, 64, OPTIONS.rotation_width, OPTIONS.shared_rank, torch.float16)
RANKS = [8, 16, 32, 64] * 4


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device=META)


PAIR = SharedPair("pair", meta(14336, 256), meta(256, 14336))


def lora(inputs: int, out: int, rank: int) -> Member:
    return Member(terms=(Term(meta(inputs, rank), meta(rank, out)),))


def dora(inputs: int, out: int, rank: int) -> Member:
    return Member(scale=meta(out), terms=(Term(meta(inputs, rank), meta(rank, out), e=meta(out)),))


def ia3(inputs: int, out: int) -> Member:  # noqa: ARG001
    return Member(scale=meta(out))


def vera(inputs: int, out: int) -> Member:
    a, b = PAIR.a[:inputs], PAIR.b[:, :out]
    return Member(terms=(Term(a, b, 1.0, meta(256), meta(out), Owner.SHARED, Owner.SHARED, PAIR),))


def oft(inputs: int, out: int) -> Member:  # noqa: ARG001
    return Member(rotation=Rotation(meta(inputs // 32, 32, 32)))


IA3 = [("qkv", 1), ("qkv", 2), ("gate_up", 1)]  # k, v, and down's inputs as outputs of up
VERA = [("qkv", 0), ("qkv", 2)]
ALL = [(name, index) for name, outs in SLICES.items() for index in range(len(outs))]


def slices(make, places: list[tuple[str, int]], *options: int) -> list[SliceSlots]:
    """An adapter as `pack` makes it, one piece a slice."""
    pieces = []
    for name, index in places:
        base = SimpleNamespace(skip_bias_add=False, bias=None, input_size=INPUTS[name])
        layer = SimpleNamespace(
            base_layer=base, input_size=INPUTS[name], tp_rank=0, output_slices=SLICES[name], name=name
        )
        member = make(INPUTS[name], SLICES[name][index], *options)
        pieces.append(pack(layer, index, member, torch.float16, OPTIONS))
    return pieces * LAYERS


def pool() -> Iterator[tuple[list[SliceSlots], int]]:
    """The adapters of the pool and how many there are of each."""
    yield slices(ia3, IA3), 500
    yield slices(vera, VERA), 500
    for rank in RANKS:
        yield slices(lora, ALL, rank), 1
    yield slices(oft, ALL), 8


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_reserved_over_owned():
    """The table's pool of issue 3: 1,000 (IA)3 and VeRA, 16 LoRA of ranks 8 to 64, 8 OFT."""
    adapters = list(pool())
    sizes = [sum(piece.units for piece in pieces) for pieces, count in adapters for _ in range(count)]
    assert len(sizes) == 1024
    owned = sum(count * bytes_of([t for p in pieces for _, t in p.pieces()]) for pieces, count in adapters)
    owned += 2 * 256 * 14336 * 2  # the one pair that all VeRA tenants use

    arena = Arena(largest_batch(sizes, SLOTS), LIMITS.largest_dummy_piece(SHAPES), SLOTS, 7 * LAYERS, META)
    pairs = SharedPairs(OPTIONS.shared_pairs, 256, 14336, 14336, torch.float16, META)
    plan = BatchPlan(ROWS, SLOTS, OPTIONS.shared_pairs, LIMITS.rank, META)
    reserved = bytes_of([arena.memory, arena.table, pairs.a, pairs.b, pairs.rank, plan.buffer])
    print(f"reserved {reserved / 2**20:.1f} MiB, owned {owned / 2**20:.1f} MiB, ratio {reserved / owned:.4f}")
    assert reserved / owned <= 1.1


def test_rank_is_a_budget():
    """Any mix of ranks with the same sum takes the same memory, and a rank takes what its rows take."""
    of_rank = {rank: sum(p.units for p in slices(lora, ALL, rank)) for rank in [1, 5, 8, 16, 64]}
    assert of_rank[64] == 4 * of_rank[16] == 8 * of_rank[8]
    assert of_rank[64] * UNIT_BYTES == 64 * LAYERS * 2 * sum(
        INPUTS[name] + out for name, outs in SLICES.items() for out in outs
    )


@pytest.mark.parametrize(
    "adapter",
    [(lora, ALL, 64), (dora, ALL, 64), (ia3, ALL), (vera, ALL), (oft, ALL)],
    ids=["lora", "dora", "ia3", "vera", "oft"],
)
def test_the_largest_adapter_of_a_method_fits_a_share_of_the_default(adapter):
    assert sum(piece.units for piece in slices(*adapter)) <= LIMITS.largest_adapter(SHAPES)


def test_what_is_switched_off_reserves_nothing():
    lora_only = Limits(16, 16, 0, 0, torch.float16)
    factors = sum(piece.units for piece in slices(lora, ALL, 16))
    vectors = 2 * sum(piece.units for piece in slices(ia3, ALL))
    assert lora_only.largest_adapter(SHAPES) == factors + vectors
    none = [LayerShape(shape.inputs, shape.slices, rotates=False, shares=False) for shape in SHAPES]
    assert Limits(16, 16, 128, 256, torch.float16).largest_adapter(none) == factors + vectors


def test_a_dummy_reads_no_further_than_the_zeros():
    zeros = LIMITS.largest_dummy_piece(SHAPES)
    for inputs, outs in zip(INPUTS.values(), SLICES.values(), strict=True):
        for size in [inputs, *outs]:
            assert meta(LIMITS.dummy_rank, size).half().nbytes <= zeros * UNIT_BYTES
    assert Limits(512, 4, 0, 0, torch.float16).dummy_rank == 4
    assert LIMITS.largest_dummy_piece([]) == 0


def test_the_largest_adapters_make_the_largest_batch():
    sizes = [3, 9, 1, 7]
    for slots in range(6):
        batches = itertools.combinations(sizes, min(slots, len(sizes)))
        assert largest_batch(sizes, slots) == max(map(sum, batches))
