"""What a run measures: engines that share the GPU, and cells in order of importance."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from serving.loads import Load
from serving.pools import POOLS, Pool

Arm = tuple[str, str]  # the name of an engine, and the variant of the pool that it serves


@dataclass(frozen=True, slots=True)
class Cell:
    """A pool under a load, through several arms in turn. requests: of a stream."""

    pool: str
    load: Load
    arms: tuple[Arm, ...]
    requests: int

    @property
    def name(self) -> str:
        return f"{self.pool} {self.load.name}"


@dataclass(frozen=True, slots=True)
class Block:
    """Cells that are repeated together: every repetition goes through all of them."""

    cells: tuple[Cell, ...]
    repetitions: int


Plan = Sequence[Block]
BURSTS = ("decode:burst", "prefill:burst")


def _cells(pools: Sequence[str], loads: Sequence[str], arms: Sequence[str], each: int | None = 8) -> tuple[Cell, ...]:
    """arms: ENGINE/VARIANT. each: requests of a tenant; None for the 128 of the paper's pools of one method."""
    parsed = tuple((engine, variant) for engine, _, variant in (arm.partition("/") for arm in arms))
    return tuple(
        Cell(pool, Load.parse(load), parsed, 128 if each is None else each * POOLS[pool].size)
        for pool in pools
        for load in loads
    )


def _growing(*methods: str) -> list[str]:
    return [f"{method}-{count}" for method in methods for count in (1, 2, 4, 8, 16)]


LORA_ONLY = ("stock/lora", "stock-tuned/lora", "scute/lora")
TUNED = ("stock-tuned/lora",)
MIXES = ("scute/lora", "scute/own", "scute/base")
CONVERSIONS = ("scute/own", "stock-256/converted", "stock-tuned-256/converted")

_BOUNDS = (
    Block(_cells(["five-methods"], BURSTS[:1], ("base/base", *TUNED, "stock-tuned-256/converted", *MIXES)), 3),
    # A stream of prompts takes a second, and the host decides how its first step is packed.
    Block(_cells(["five-methods"], BURSTS[1:], ("base/base", *TUNED, *MIXES)), 9),
    Block(_cells(_growing("vera", "ia3"), ["decode:burst"], ("scute/own",), each=None), 2),
)

PLANS: Mapping[str, Plan] = {
    # Table 4 and its base line, then other pools and loads of Table A8 and of Figure 3.
    "pools": (
        Block(_cells(["five-methods"], BURSTS, ("base/base", *LORA_ONLY, "scute/own", "scute/base")), 6),
        Block(_cells(["without-vera"], BURSTS, ("base/base", *LORA_ONLY, "scute/own")), 3),
        Block(_cells(_growing("vera", "ia3"), ["decode:burst"], ("scute/own",), each=None), 3),
        Block(_cells(["five-methods"], ["decode:burst:zipf", "decode:32", "prefill:32"], (*LORA_ONLY, "scute/own")), 3),
    ),
    # What issue 3 bounds, beside stock as shipped, in as few engines as one GPU holds at once.
    "bounds": _BOUNDS,
    # The same and every other pool and load that these engines can serve; 11 minutes on one H200.
    "figures": (
        *_BOUNDS,
        Block(_cells(["five-methods"], ["decode:burst:zipf", "decode:32", "prefill:32"], (*TUNED, *MIXES[:2])), 2),
        Block(_cells(["without-vera"], BURSTS, ("base/base", *TUNED, "scute/own")), 2),
        Block(_cells(["mixed-ranks"], BURSTS, ("stock-tuned-256/own", "scute/own")), 2),
    ),
    # Table 4's conversions.
    "conversions": (Block(_cells(["five-methods"], BURSTS, CONVERSIONS), 3),),
    # Ranks that stock pads.
    "mixed-ranks": (Block(_cells(["mixed-ranks"], BURSTS, ("scute/own", "stock-256/own", "stock-tuned-256/own")), 3),),
    # The same with VeRA at rank 64, and without VeRA.
    "conversions-64": (
        Block(
            _cells(["five-methods-64"], BURSTS, ("scute/own", "stock-64/converted", "stock-tuned-64/converted"))
            + _cells(["without-vera"], BURSTS, ("scute/own", "stock-64/converted", "stock-tuned-64/converted")),
            3,
        ),
    ),
    # Figure 3: one method, 1 to 16 tenants.
    "tenants": (
        Block(
            _cells(_growing("lora"), ["decode:burst"], ("stock-tuned/own", "scute/own"), each=None)
            + _cells(_growing("vera", "ia3", "oft", "dora"), ["decode:burst"], ("scute/own",), each=None),
            3,
        ),
    ),
    # A rehearsal: every arm of the first table, once.
    "rehearsal": (
        Block(
            _cells(["five-methods"], BURSTS, ("base/base", "stock/lora", "scute/lora", "scute/own", "scute/base")), 1
        ),
    ),
}


def engines_of(plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(engine for block in plan for cell in block.cells for engine, _ in cell.arms))


def narrowed(plan: Plan, engines: Sequence[str] | None, cells: Sequence[str] | None) -> Plan:
    """The plan with the arms of these engines alone, and the cells in whose names one of these patterns is found."""
    blocks = []
    for block in plan:
        kept = [c for c in block.cells if cells is None or any(re.search(pattern, c.name) for pattern in cells)]
        kept = [replace(c, arms=tuple(a for a in c.arms if engines is None or a[0] in engines)) for c in kept]
        blocks.append(replace(block, cells=tuple(cell for cell in kept if cell.arms)))
    return [block for block in blocks if block.cells]


def served(plan: Plan, engine: str) -> tuple[tuple[Pool, str], ...]:
    """Pools and variants that an engine serves in the plan."""
    pairs = ((cell.pool, arm) for block in plan for cell in block.cells for arm in cell.arms)
    return tuple((POOLS[pool], v) for pool, v in dict.fromkeys((pool, v) for pool, (e, v) in pairs if e == engine))


def tenants_of(plan: Plan, engine: str) -> tuple[str, ...]:
    """Every adapter that an engine serves in the plan."""
    return tuple(dict.fromkeys(name for pool, variant in served(plan, engine) for name in pool.distinct(variant)))
