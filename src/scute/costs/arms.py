"""The ways to serve a pool of adapters, and what a step and the device's memory of each hold."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scute.costs.base import Base
from scute.costs.device import Device
from scute.costs.layers import LayerShape
from scute.costs.slots import Counting, Piece
from scute.costs.step import Step, scute_launches, spread, step_traffic, stock_launches
from scute.costs.tenant import Tenant, pair_bytes, stock_rank
from scute.costs.traffic import Route
from scute.kernels.routes import FIELDS

ENTRY_BYTES = 4 * FIELDS
"""Of the table, for one adapter and slice."""


class Asked(NamedTuple):
    """decode, prefill: rows of the two steps, 0 for no prefill step."""

    base: Base
    device: Device
    decode: int
    prefill: int

    @property
    def counting(self) -> Counting:
        return self.base.counting


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve the pool. rank: that stock runs every adapter at, or None where each has its own.

    decode, prefill: what one step adds; prefill is None if none was asked for. memory: bytes on the device by kind of
    piece. adapter_bytes: of them, those of the mean adapter, rounded up; once_bytes: those that stay as adapters come.
    """

    name: str
    rank: int | None
    decode: Step
    prefill: Step | None
    memory: Mapping[str, int]
    adapter_bytes: int
    once_bytes: int


def scute_arm(pool: Sequence[Tenant], asked: Asked) -> Arm:
    """Every adapter as it is. Memory: its pieces in the arena, its rows of the table, and each shared pair once."""
    memory = _owned(pool, asked, in_arena=True)
    slices = sum(len(shape.slices) for shape, _ in asked.base.layers)
    own = {**memory, "table": ENTRY_BYTES * slices * len(pool)}
    pairs = pair_bytes(pool, asked.base)
    kept = own | ({str(Piece.PAIR): pairs} if pairs else {})
    return _arm("Scute", None, pool, asked, lambda rows: scute_launches(rows, asked.device), kept, pairs)


def stock_arm(pool: Sequence[Tenant], asked: Asked, rank: int) -> Arm:
    """What is not LoRA converted at `rank`, and all of it padded to the least rank that vLLM has for the largest."""
    loras = [tenant.converted(rank) for tenant in pool]
    padded_rank = stock_rank(loras)
    padded = [lora.padded(padded_rank) for lora in loras]
    kept = _owned(padded, asked, in_arena=False)
    return _arm(f"LoRA {rank}", padded_rank, padded, asked, lambda _: stock_launches, kept, 0)


def _arm(
    name: str,
    rank: int | None,
    pool: Sequence[Tenant],
    asked: Asked,
    launched: Callable[[int], Callable[[LayerShape, frozenset[Route]], int]],
    memory: Mapping[str, int],
    once: int,
) -> Arm:
    def step(rows: int) -> Step:
        shares = spread(rows, len(pool))
        traffic = step_traffic(asked.base.layers, pool, shares, asked.counting, launched(rows))
        return Step.of(asked.device, traffic, rows)

    prefill = step(asked.prefill) if asked.prefill else None
    mean = -(-(sum(memory.values()) - once) // len(pool))
    return Arm(name, rank, step(asked.decode), prefill, memory, mean, once)


def _owned(pool: Sequence[Tenant], asked: Asked, *, in_arena: bool) -> dict[str, int]:
    total: Counter[Piece] = Counter()
    for tenant in pool:
        total.update(tenant.owned(asked.base.layers, asked.counting, in_arena=in_arena))
    return {str(piece): size for piece, size in total.items()}
