"""Pools of tenants, and what each arm serves in their place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

METHODS = ("lora", "dora", "ia3", "vera", "oft")
EACH = 4


@dataclass(frozen=True, slots=True)
class Pool:
    """tenants: name of each position's tenant, by variant; None is the base model.

    Variants: "own" serves every tenant as it is, "lora" as many plain LoRA tenants of rank 16, "converted" what a
    conversion to LoRA gives, "base" no adapter.
    """

    name: str
    tenants: Mapping[str, tuple[str | None, ...]]

    @property
    def size(self) -> int:
        return len(self.tenants["own"])

    def distinct(self, variant: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tenant for tenant in self.tenants[variant] if tenant))


def kind_of(tenant: str) -> str:
    """A tenant is named KIND.NUMBER."""
    return tenant.rpartition(".")[0]


def _pool(name: str, own: list[str], converted: Callable[[str], str]) -> Pool:
    return Pool(
        name,
        {
            "own": tuple(own),
            "lora": tuple(f"lora.{number}" for number in range(len(own))),
            "converted": tuple(map(converted, own)),
            "base": (None,) * len(own),
        },
    )


def _converter(vera: int) -> Callable[[str], str]:
    kinds = {"dora": "dora-as-r64", "oft": "oft-as-r64", "ia3": "ia3-as-r64", "vera": f"vera-as-r{vera}"}

    def converted(tenant: str) -> str:
        kind, _, number = tenant.rpartition(".")
        return f"{kinds.get(kind, kind)}.{number}"

    return converted


def _in_turn(kinds: tuple[str, ...]) -> list[str]:
    return [f"{kind}.{number}" for number in range(EACH) for kind in kinds]


def _pools() -> dict[str, Pool]:
    without_vera = tuple(method for method in METHODS if method != "vera")
    pools = [
        _pool("five-methods", _in_turn(METHODS), _converter(256)),
        _pool("five-methods-64", _in_turn(METHODS), _converter(64)),
        _pool("without-vera", _in_turn(without_vera), _converter(256)),
        _pool("mixed-ranks", _in_turn(("lora-r8", "lora", "lora-r64", "lora-r256")), _converter(256)),
    ]
    pools += [
        _pool(f"{method}-{count}", [f"{method}.{number}" for number in range(count)], _converter(256))
        for method in METHODS
        for count in (1, 2, 4, 8, 16)
    ]
    return {pool.name: pool for pool in pools}


POOLS: Mapping[str, Pool] = _pools()
