"""Times of device work: CUDA graphs that are replayed on a cold L2 cache; on the CPU, a host clock."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

FLUSH_BYTES = 2**30
"""Read before every timed replay; many times the L2 of any GPU, and longer than the host takes to queue a graph."""


class Samples(NamedTuple):
    """Milliseconds: median, and the 20th and 80th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Samples":
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])


class Recorded:
    """Work that can be run again and again: a CUDA graph of it, or the work itself on the CPU."""

    def __init__(self, work: Callable[[], object], device: torch.device, stream: torch.cuda.Stream | None) -> None:
        """Runs the work once, which compiles and allocates, then records it. `result`: what the recording returned."""
        if stream is None:
            self.run: Callable[[], object] = work
            self.result = work()
            return
        # Not torch.cuda.graph, which collects garbage and empties the allocator before each capture.
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            work()
            torch.cuda.synchronize(device)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.result = work()
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        self.run = graph.replay


class Clock:
    """Times recorded work, several pieces of it in turn, so that a drift of the device meets all alike."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._flush: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._flush = torch.zeros(FLUSH_BYTES // 4, device=self.device)
            self._sink = torch.zeros((), device=self.device)
            # One for all, as the allocator keeps memory by stream.
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def flush(self) -> None:
        """Leave nothing of earlier work in L2; keeps the device busy until what comes next is queued."""
        if self._flush is not None:
            torch.sum(self._flush, dim=0, out=self._sink)  # read, as lines that were written must be written back

    def record(self, work: Callable[[], object]) -> Recorded:
        return Recorded(work, self.device, self._stream)

    def time(self, *recorded: Recorded, repeats: int, warm_seconds: float = 0.05) -> list[Samples]:
        """Samples of each, in the order given."""
        if self._flush is None:
            return [self._time_on_host(r, repeats) for r in recorded]
        self._warm(recorded, warm_seconds)
        events = [[self._replay(r) for r in recorded] for _ in range(repeats)]
        torch.cuda.synchronize(self.device)
        return [Samples.of([row[i][0].elapsed_time(row[i][1]) for row in events]) for i in range(len(recorded))]

    def _warm(self, recorded: Sequence[Recorded], seconds: float) -> None:
        end = time.perf_counter() + seconds
        while True:
            for r in recorded:
                r.run()
            torch.cuda.synchronize(self.device)
            if time.perf_counter() >= end:
                return

    def _replay(self, recorded: Recorded) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self.flush()
        start.record()
        recorded.run()
        end.record()
        return start, end

    @staticmethod
    def _time_on_host(recorded: Recorded, repeats: int) -> Samples:
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            recorded.run()
            seconds.append(time.perf_counter() - start)
        return Samples.of([1e3 * s for s in seconds])
