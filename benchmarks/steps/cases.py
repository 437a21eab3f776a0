"""What is timed: pools of adapters on the projections of Llama-3.1-8B, batches of a decode and of a prefill step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from scute.costs import Counting, Slots, layer_bytes
from scute.tuning.layers import Adapter, LayerShape

LLAMA_8B = (
    LayerShape("qkv", 4096, (4096, 1024, 1024)),
    LayerShape("o", 4096, (4096,)),
    LayerShape("gate_up", 4096, (14336, 14336)),
    LayerShape("down", 14336, (4096,)),
)
LAYERS = 32
TENANTS = 20
PROMPT_TOKENS = 256
DECODE_TOKENS = 64
PREFILL_TOKENS = 8192

SHARED_RANK = 256
# PEFT's default targets of (IA)3 on Llama: keys, values, and the input of the down projection, which is s of up.
IA3 = Adapter(scale=True, only={"qkv": (1, 2), "gate_up": (1,)})
LORA = Adapter(rank=16)
DORA = Adapter(rank=16, scale=True)
VERA = Adapter(shared=True)
OFT = Adapter(rotation_width=32)

SMALL = (
    LayerShape("qkv", 64, (64, 32, 32)),
    LayerShape("o", 64, (64,)),
    LayerShape("gate_up", 64, (96, 96)),
    LayerShape("down", 96, (64,)),
)
"""The same kinds of layer, small enough for a dry run on the CPU."""


@dataclass(frozen=True, slots=True)
class Case:
    """name; the adapters of the pool; the rank that stock needs to serve as many tenants of them, converted."""

    name: str
    adapters: tuple[Adapter, ...]
    converted_rank: int


def _turns(*members: Adapter) -> tuple[Adapter, ...]:
    return tuple(members[i % len(members)] for i in range(TENANTS))


CASES = {
    case.name: case
    for case in (
        Case("lora-16", _turns(LORA), 16),
        Case("lora-64", _turns(Adapter(rank=64)), 64),
        Case("lora-mixed", _turns(*(Adapter(rank=rank) for rank in (8, 16, 64, 256))), 256),
        Case("ia3", _turns(IA3), 64),
        Case("dora-16", _turns(DORA), 16),
        Case("vera", _turns(VERA), 256),
        Case("oft", _turns(OFT), 64),
        Case("five-methods", _turns(LORA, DORA, IA3, VERA, OFT), 256),
    )
}

# Rank 256 everywhere is how stock serves VeRA exactly.
STOCK_CASES = {
    **{name: CASES[name] for name in ("lora-16", "lora-64", "lora-mixed")},
    "lora-256": Case("lora-256", _turns(Adapter(rank=256)), 256),
}


def slot_of_row(tokens: int, tenants: int = TENANTS) -> list[int]:
    """Tenants in turn: one row each in a decode step, whole prompts in a prefill step."""
    if tokens <= PROMPT_TOKENS:
        return [row % tenants for row in range(tokens)]
    return [row // PROMPT_TOKENS % tenants for row in range(tokens)]


def sampled_rows(slots: Sequence[int]) -> list[int]:
    """The first and the last row of every run of equal slots among the first turns, and the ends of the batch."""
    starts = [0, *(row for row, (left, right) in enumerate(pairwise(slots), 1) if left != right)]
    picked = {row for start in starts[: 2 * TENANTS] for row in (start, start - 1) if row >= 0}
    return sorted(picked | {len(slots) - 1, len(slots) // 2})


def slots_of(adapter: Adapter, shape: LayerShape) -> tuple[Slots | None, ...]:
    """The adapter on every slice of a layer; all that share a pair share the same."""
    own = Slots(
        rank=adapter.rank,
        scale=adapter.scale,
        shift=adapter.shift,
        rotation_width=adapter.rotation_width,
        pair="pair" if adapter.shared else None,
        shared_rank=SHARED_RANK if adapter.shared else 0,
    )
    return tuple(own if adapter.adapts(shape, i) else None for i in range(len(shape.slices)))


def least_bytes(case: Case, shapes: Sequence[LayerShape], copies: int, slots: Sequence[int], itemsize: int) -> int:
    """Bytes that the adapter work of a step must move, as `scute.costs` counts them."""
    rows = [slots.count(slot) for slot in range(len(case.adapters))]
    counting = Counting(factor=itemsize)
    counts = [
        layer_bytes(shape, zip((slots_of(a, shape) for a in case.adapters), rows, strict=True), counting)
        for shape in shapes
    ]
    return copies * sum(count.total() for count in counts)
