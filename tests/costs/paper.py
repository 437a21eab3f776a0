"""The paper's pools as sizes, and every figure of its byte model: printed, and as `scute.costs` has it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from scute.costs import PAPER, Counting, FusedLayer, Slots, Tenant, find_device, fused_layers, step_traffic
from scute.costs.outside import OUTSIDE

SIZES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 1024),
    "self_attn.v_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 14336),
    "mlp.up_proj": (4096, 14336),
    "mlp.down_proj": (14336, 4096),
}
LLAMA_8B: tuple[FusedLayer, ...] = tuple(
    fused_layers({f"{i}.{n}": size for i in range(32) for n, size in SIZES.items()})
)
BETA = find_device("NVIDIA RTX A6000").bytes_per_second
ALL = tuple(SIZES)
IA3_SITES = ("self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")


def tenant(method: str, own: Slots, sites: Sequence[str] = ALL) -> Tenant:
    slots = tuple(
        tuple(own if module.partition(".")[2] in sites else None for module in layer.modules) for layer in LLAMA_8B
    )
    return Tenant(method, method, slots)


LORA = tenant("LoRA", Slots(rank=16))
DORA = tenant("DoRA", Slots(rank=16, scale=True))
IA3 = tenant("(IA)3", Slots(scale=True), IA3_SITES)
VERA = tenant("VeRA", Slots(pair="pair", shared_rank=256))
OFT = tenant("OFT", Slots(rotation_width=32))
FOUR = (LORA, DORA, IA3, OFT) * 4
FIVE = (*FOUR, *[VERA] * 4)


def total_bytes(pool: Sequence[Tenant], counting: Counting = PAPER) -> int:
    """Of one decode step with a row for each tenant."""
    return sum(layer.total for layer in step_traffic(LLAMA_8B, pool, [1] * len(pool), counting))


def gb(pool: Sequence[Tenant]) -> float:
    return total_bytes(pool) / 1e9


def ms(pool: Sequence[Tenant], counting: Counting = PAPER) -> float:
    return 1e3 * total_bytes(pool, counting) / BETA


def added(own: Tenant) -> float:
    """Milliseconds that one more tenant adds to one."""
    return ms([own] * 2) - ms([own])


def converted(pool: Sequence[Tenant]) -> list[Tenant]:
    """As section 6.1 has stock: VeRA at rank 256, what else is not LoRA at rank 64."""
    return [own.converted(256 if own.method == "VeRA" else 64) for own in pool]


def with_zeros(pool: Sequence[Tenant]) -> list[Tenant]:
    return [own.with_zeros() for own in converted(pool)]


def padded(pool: Sequence[Tenant], resident: int) -> list[Tenant]:
    """Those that stock keeps resident, at the largest rank of the pool."""
    rank = max(own.max_rank for own in converted(pool))
    return [own.padded(rank) for own in converted(pool)][:resident]


class Figure(NamedTuple):
    """place; quantity with its unit; printed: as in the paper; value: of the model."""

    place: str
    quantity: str
    printed: str
    value: float

    @property
    def rounded(self) -> str:
        return f"{self.value:.{len(self.printed.partition('.')[2])}f}"

    @property
    def agrees(self) -> bool:
        return self.rounded == self.printed


def figures() -> Iterator[Figure]:
    table_2: Mapping[str, tuple[Tenant, str, str]] = {
        "LoRA, rank 16": (LORA, "1.34", "1.97"),
        "VeRA, route 2": (VERA, "1.19", "1.75"),
        "VeRA as LoRA, rank 256": (VERA.converted(256), "21.47", "31.58"),
        "VeRA as LoRA, rank 64": (VERA.converted(64), "5.37", "7.90"),
        "OFT, route 3": (OFT, "1.28", "1.88"),
        "OFT as LoRA, rank 64": (OFT.converted(64), "5.37", "7.90"),
        "(IA)3, route 1": (IA3, "0.01", "0.01"),
        "(IA)3 as LoRA, rank 64": (IA3.converted(64), "1.88", "2.76"),
    }
    for name, (own, read, time) in table_2.items():
        yield Figure("Table 2", f"{name}, GB", read, gb([own] * 16))
        yield Figure("Table 2", f"{name}, ms", time, ms([own] * 16))
    table_9 = {
        "VeRA, Scute": (VERA, "0.00"),
        "VeRA, rank 256": (VERA.padded(256), "1.97"),
        "OFT, Scute": (OFT, "0.12"),
        "OFT, rank 64": (OFT.padded(64), "0.49"),
        "OFT, rank 256": (OFT.padded(256), "1.97"),
        "(IA)3, Scute": (IA3, "0.00"),
        "(IA)3, rank 64": (IA3.padded(64), "0.49"),
    }
    for name, (own, time) in table_9.items():
        yield Figure("Table A9", f"{name}, ms", time, added(own))
    accounts: Mapping[str, tuple[Callable[[Sequence[Tenant]], Sequence[Tenant]], str, str]] = {
        "conversions at own rank": (converted, "13.0", "5.1"),
        "+ zero factors elsewhere": (with_zeros, "14.3", "6.4"),
        "+ padding": (lambda pool: padded(pool, 16), "31.6", "7.9"),
        "Scute": (list, "3.1", "1.5"),
    }
    for name, (arm, five, four) in accounts.items():
        yield Figure("Table A10", f"{name}, 20 tenants, ms", five, ms(arm(FIVE)))
        yield Figure("Table A10", f"{name}, 16 without VeRA, ms", four, ms(arm(FOUR)))
    yield Figure("Section 1", "a VeRA tenant as LoRA, rank 64, GB", "0.34", gb([VERA.converted(64)]))
    rows, out = 1024, 4096
    lora = 2 * 2 * rows * out  # the expand reads y and writes it
    for name, printed in {"gathered scale": "2", "vLLM outside": "3"}.items():
        outside = (lora + OUTSIDE[name].bytes_moved(rows, out)) / lora
        yield Figure("Section 4", f"{name}, bytes over those of the LoRA expand", printed, outside)


IA3_ON_DOWN = tenant("(IA)3", Slots(scale=True), ("self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"))
WITHOUT_VECTORS = PAPER._replace(vector=0)

NOT_REPRODUCED = {
    "(IA)3, route 1, GB": (
        "0.02",
        "The vector of the feed-forward has 14,336 elements, on the outputs of up, where the paper serves it. The "
        "paper's figure is that of 4,096, the outputs of down.",
        lambda: gb([IA3_ON_DOWN] * 16),
    ),
    "(IA)3, route 1, ms": ("0.02", "The same.", lambda: ms([IA3_ON_DOWN] * 16)),
    "Scute, 20 tenants, ms": (
        "3.2",
        "Table 2 counts the vectors of VeRA, so this does, too. Without any vector it is the paper's figure.",
        lambda: ms(FIVE, WITHOUT_VECTORS),
    ),
}
"""Quantity to what the model says, why, and a reading that gives what the paper prints."""
