"""The two constants of the byte model, measured on this device: bandwidth and the cost of a launch in a graph."""

import torch
from rows import Environment

from scute.tuning.timing import Clock
from steps.measure import BANDWIDTH, LAUNCH
from steps.record import Constants

_COPY_BYTES = 256 * 2**20
_LAUNCHES = 200
_CHAIN = 64


def measure(clock: Clock, environment: Environment) -> Constants:
    """On the CPU, the constants of the H200."""
    if clock.device.type != "cuda":
        return Constants(
            environment=environment, bandwidth=BANDWIDTH, cached_bandwidth=BANDWIDTH, l2_bytes=0, launch=LAUNCH
        )
    l2_bytes = torch.cuda.get_device_properties(clock.device).L2_cache_size
    one = torch.zeros(1, device=clock.device)
    return Constants(
        environment=environment,
        bandwidth=_copy(clock, _COPY_BYTES, 4),
        cached_bandwidth=max(_copy(clock, l2_bytes // part, _CHAIN) for part in (16, 8, 4)),
        l2_bytes=l2_bytes,
        launch=_time(clock, lambda: [one.add_(1) for _ in range(_LAUNCHES)]) / _LAUNCHES,
    )


def _copy(clock: Clock, size: int, chain: int) -> float:
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    pairs = [(target, source) if i % 2 == 0 else (source, target) for i in range(chain)]
    return 2e3 * size * chain / _time(clock, lambda: [to.copy_(of) for to, of in pairs])


def _time(clock: Clock, work) -> float:  # type: ignore[no-untyped-def]
    return clock.time(clock.record(work), repeats=11)[0].median
