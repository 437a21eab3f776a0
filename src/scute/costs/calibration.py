"""Measures the constants of a device as the paper does (appendix F): bandwidth, that within L2, a launch."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scute.costs.device import Device, file_of, user_folder

if TYPE_CHECKING:
    import torch

COPY_BYTES = 256 * 2**20
COPIES = 4
L2_PARTS = (16, 8, 4)
L2_COPIES = 64
"""One such copy takes a few microseconds, most of them its launch, so many follow each other."""
LAUNCHES = 200
REPEATS = 5
MEASURED = ("bandwidth_gb_s", "l2_bandwidth_gb_s", "launch_us", "l2_mib", "memory_gib", "capability")


class Clock(Protocol):
    """As `scute.tuning.timing.Clock`: times are milliseconds, of a CUDA graph on a GPU."""

    device: "torch.device"

    def record(self, work: Callable[[], object], /) -> Any: ...

    def time(self, *recorded: Any, repeats: int) -> Any: ...


class Calibration:
    """seconds: to spend on all measurements together, about. progress: told what comes next, steps done, and all."""

    def __init__(
        self, clock: Clock, seconds: float = 0.0, progress: Callable[[str, int, int], None] = lambda *_: None
    ) -> None:
        self.clock, self.seconds, self.progress = clock, seconds, progress

    def run(self, device: Device) -> Device:
        """The device with what was measured. Bandwidth within L2 is left out where the size of L2 is not known."""
        sizes = [] if device.l2_mib is None else [int(device.l2_mib * 2**20) // part for part in L2_PARTS]
        total = 2 + len(sizes)
        share = self.seconds / total
        self.progress("copy in memory", 0, total)
        found = replace(device, bandwidth_gb_s=self._copy(COPY_BYTES, COPIES, share))
        cached = []
        for place, size in enumerate(sizes):
            self.progress("copy in L2", 1 + place, total)
            cached.append(self._copy(size, L2_COPIES, share))
        self.progress("launch", total - 1, total)
        return replace(found, l2_bandwidth_gb_s=max(cached, default=None), launch_us=self._launch(share))

    def _copy(self, size: int, copies: int, seconds: float) -> float:
        """10^9 bytes a second, read and written."""
        import torch

        first = torch.randint(0, 255, (size,), dtype=torch.uint8, device=self.clock.device)
        second = torch.empty_like(first)
        pairs = [(second, first) if i % 2 == 0 else (first, second) for i in range(copies)]
        return 2 * size * copies / self._ms(lambda: [to.copy_(of) for to, of in pairs], seconds) / 1e6

    def _launch(self, seconds: float) -> float:
        """Microseconds of one kernel of one block, each after the last."""
        import torch

        one = torch.zeros(1, device=self.clock.device)
        return 1e3 * self._ms(lambda: [one.add_(1) for _ in range(LAUNCHES)], seconds) / LAUNCHES

    def _ms(self, work: Callable[[], object], seconds: float) -> float:
        recorded, end = self.clock.record(work), time.perf_counter() + seconds
        found = [self.clock.time(recorded, repeats=REPEATS)[0].median]
        while time.perf_counter() < end:
            found.append(self.clock.time(recorded, repeats=REPEATS)[0].median)
        return float(statistics.median(found))


def describe_device(device: "torch.device") -> Device:
    """What torch says of it without a measurement."""
    import torch

    if device.type != "cuda":
        return Device(f"CPU {platform.machine()}")
    properties = torch.cuda.get_device_properties(device)
    return Device(
        properties.name,
        l2_mib=properties.L2_cache_size / 2**20,
        memory_gib=properties.total_memory / 2**30,
        capability=f"{properties.major}.{properties.minor}",
    )


def store(device: Device, folder: Path | None = None) -> tuple[Device, Path]:
    """Write what is known of a device, by its name, to the user's folder by default.

    Returns the device with the source of every figure, and the file.
    """
    import torch

    known = {name: value for name, value in asdict(device).items() if name in MEASURED and value is not None}
    device = replace(
        device, sources=dict.fromkeys(known, f"scute calibrate, torch {torch.__version__}, {date.today()}")
    )
    path = file_of(user_folder() if folder is None else folder, device.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"name": device.name, **known, "sources": device.sources}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=2) + "\n")
    new.replace(path)
    return device, path
