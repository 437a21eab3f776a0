"""Checks, then times, one engine on one case."""

import sys
from collections import defaultdict

import torch
from torch import Tensor

from scute.costs import find_device
from scute.tuning.timing import Clock, Recorded
from steps.arms import Arm
from steps.record import Correctness, Performance, Time

_H200 = find_device("NVIDIA H200")
BANDWIDTH = _H200.bytes_per_second
"""Bytes a second of a 256 MiB copy on the H200, read and written."""
LAUNCH = 1e3 * _H200.launch_seconds
"""Milliseconds of one launch in a CUDA graph there."""


class Measurement:
    """clock: of the device; repeats: replays of every graph; scale: layers of the model over layers recorded."""

    def __init__(self, clock: Clock, repeats: int, scale: float) -> None:
        self.clock, self.repeats, self.scale = clock, repeats, scale

    def run(self, arm: Arm, least_bytes: int, base: Recorded | None) -> tuple[Correctness, Performance | None]:
        """least_bytes: of the layers that are recorded. base: the base GEMMs alone, recorded, or None without them."""
        verdict = arm.check()
        alone = self._recorded(arm, arm.alone)
        recorded, error = [alone[0]], alone[1]
        if base is not None:
            step = self._recorded(arm, arm.step)
            recorded += [step[0], base]
            error = max(error, step[1])
        correctness = Correctness.of(verdict, error)
        if not correctness.passed:
            return correctness, None
        times = [Time.of(s, self.scale) for s in self.clock.time(*recorded, repeats=self.repeats)]
        profiles = [profile_kernels(self.clock, r) for r in recorded]
        launches = [round(self.scale * sum(n for n, _ in p.values())) if p else None for p in profiles]
        bytes_ms = 1e3 * self.scale * least_bytes / BANDWIDTH
        step_launches = None
        if base is not None and launches[1] is not None and launches[2] is not None:
            step_launches = launches[1] - launches[2]
        return correctness, Performance(
            layers_timed=arm.workload.copies,
            step=times[1] if base is not None else None,
            base=times[2] if base is not None else None,
            adapters=times[1].median - times[2].median if base is not None else None,
            alone=times[0],
            step_launches=step_launches,
            alone_launches=launches[0],
            bytes=round(self.scale * least_bytes),
            bytes_ms=bytes_ms,
            bound=_bound(bytes_ms, step_launches),
            alone_bound=_bound(bytes_ms, launches[0]),
            kernels={name: round(self.scale * ms, 4) for name, (_, ms) in profiles[0].items()},
        )

    def _recorded(self, arm: Arm, work) -> tuple[Recorded, float]:  # type: ignore[no-untyped-def]
        """The graph of some work, and how far a replay is from the same work run eagerly (0: the same bits)."""
        recorded = self.clock.record(work)
        arm.workload.redraw()
        eager = [tensor.clone() for tensor in work()]
        arm.workload.redraw()
        replayed = recorded.run()
        if self.clock.device.type == "cuda":
            replayed = recorded.result
            torch.cuda.synchronize(self.clock.device)
        error = max(difference(a, b) for a, b in zip(eager, replayed, strict=True))  # type: ignore[call-overload]
        return recorded, error


def profile_kernels(clock: Clock, recorded: Recorded) -> dict[str, tuple[int, float]]:
    """Kernels of one replay: name to (launches, milliseconds). Empty where nothing can be profiled."""
    if clock.device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    clock.flush()
    torch.cuda.synchronize(clock.device)
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            recorded.run()
            torch.cuda.synchronize(clock.device)
        events = list(profiler.events() or ())
    except (AssertionError, RuntimeError) as error:  # the times stand without it
        print(f"no profile: {error}", file=sys.stderr)
        return {}
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, ms = found[event.name[:60]]
            found[event.name[:60]] = count + 1, ms + event.time_range.elapsed_us() / 1e3
    return dict(found)


def difference(expected: Tensor, actual: Tensor) -> float:
    """Norm of the difference over that of the first; 0 for the same bits, infinite with NaN."""
    if torch.equal(expected, actual):
        return 0.0
    difference = (expected.float() - actual.float()).norm() / expected.float().norm()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


def _bound(bytes_ms: float, launches: int | None) -> float | None:
    return None if launches is None else bytes_ms + launches * LAUNCH
