"""Processes that compile kernels side by side, so that the one that times them finds all in Triton's cache."""

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Self, TypeVar

import torch

Task = TypeVar("Task", bound=Hashable)


class Compilers(Generic[Task]):
    """compile: runs one task on the device, in a process of its own; returns what went wrong, or None.

    The processes are forked, because imports are slow, where CUDA has not been used before.
    """

    def __init__(self, processes: int, compile: Callable[[Task], str | None]) -> None:
        self.processes = processes
        self._compile = compile
        self.failures: list[tuple[Task, str]] = []

    def __enter__(self) -> Self:
        for method in ("fork", "spawn"):
            self._pool = multiprocessing.get_context(method).Pool(self.processes)
            if method == "spawn" or self._pool.apply(_can_use_cuda):
                break
            self.__exit__()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def run(self, tasks: Iterable[Task], seconds: float, progress: Callable[[], object] | None = None) -> set[Task]:
        """The tasks that compiled; those that were not begun in the time given are left out."""
        deadline = time.monotonic() + seconds
        done: set[Task] = set()
        waiting: deque[tuple[Task, multiprocessing.pool.AsyncResult[str | None]]] = deque()
        rest = iter(tasks)
        while True:
            while len(waiting) < 2 * self.processes and time.monotonic() < deadline:
                try:
                    task = next(rest)
                except StopIteration:
                    break
                waiting.append((task, self._pool.apply_async(self._compile, (task,))))
            if not waiting:
                return done
            task, result = waiting.popleft()
            failure = result.get()
            if failure is None:
                done.add(task)
            else:
                self.failures.append((task, failure))
            if progress is not None:
                progress()


def _can_use_cuda() -> bool:
    """False in a process whose parent had used CUDA before the fork."""
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError):  # the latter where torch has no CUDA at all
        return False
    return True
