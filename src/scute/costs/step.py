"""What the adapters of a batch add to one step: bytes, launches and time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from scute.costs.device import Device
from scute.costs.launches import STOCK_LAUNCHES, launches
from scute.costs.layers import FusedLayer, LayerShape
from scute.costs.slots import Counting
from scute.costs.tenant import Tenant
from scute.costs.traffic import Route, Traffic, layer_bytes, live_routes


@dataclass(frozen=True, slots=True)
class Step:
    """rows: of the batch. bytes: moved, by route. ms: what is added to the base model's step, by term.

    total_ms: of all terms; dominant: the one that takes most of it.
    """

    rows: int
    bytes: Mapping[str, int]
    launches: int
    ms: Mapping[str, float]
    total_ms: float
    dominant: str

    @classmethod
    def of(cls, device: Device, layers: Sequence[Traffic], rows: int) -> Self:
        """Raises UnknownFigure where one of the device is needed and not known."""
        total = sum(layers, Traffic())
        ms: dict[str, float] = {}
        for layer in layers:
            for term, seconds in device.seconds(layer).items():
                ms[term] = ms.get(term, 0.0) + 1e3 * seconds
        moved = {str(route): size for route, size in total.bytes.items()}
        dominant = max(ms, key=lambda term: ms[term], default="nothing")
        return cls(rows, moved, total.launches, ms, sum(ms.values()), dominant)


def spread(rows: int, adapters: int) -> list[int]:
    """Rows of each adapter: as many for each as can be, one more for the first of them."""
    return [rows // adapters + (i < rows % adapters) for i in range(adapters)]


def step_traffic(
    layers: Sequence[FusedLayer],
    tenants: Sequence[Tenant],
    rows: Sequence[int],
    counting: Counting,
    launched: Callable[[LayerShape, frozenset[Route]], int] | None = None,
) -> list[Traffic]:
    """Traffic of every layer. rows: of each tenant. launched: kernels of a layer, from what is live in the step."""
    uses = [[(tenant.slots[i], n) for tenant, n in zip(tenants, rows, strict=True)] for i in range(len(layers))]
    live = frozenset().union(*(live_routes(layer) for layer in uses))
    return [
        Traffic(layer_bytes(shape, used, counting), launched(shape, live) if launched else 0)
        for (shape, _), used in zip(layers, uses, strict=True)
    ]


def scute_launches(rows: int, device: Device) -> Callable[[LayerShape, frozenset[Route]], int]:
    return lambda shape, live: launches(shape, live, rows, device.fuses_gemm)


def stock_launches(_: LayerShape, live: frozenset[Route]) -> int:
    return STOCK_LAUNCHES if live else 0
