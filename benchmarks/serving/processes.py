"""Children that answer one request at a time over a pipe, with their output in a log file."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any


class Failed(Exception):
    """A child ended, or answered with an error, or not in time."""


class Child:
    """A module of this package, run with the number of its end of a pipe as its argument."""

    def __init__(self, module: str, log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self._pipe, theirs = Pipe()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                env=_with_benchmarks(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        theirs.close()

    def send(self, what: str, *values: Any) -> None:
        try:
            self._pipe.send((what, *values))
        except OSError as error:
            raise Failed(self._end()) from error

    def answer(self, deadline: float) -> Any:
        """What it answers until `deadline`, by time.monotonic. Raises Failed."""
        while not self._pipe.poll(0.05):
            if self._process.poll() is not None:
                raise Failed(self._end())
            if time.monotonic() > deadline:
                raise Failed("it did not answer in time")
        try:
            kind, value = self._pipe.recv()
        except EOFError as error:
            raise Failed(self._end()) from error
        if kind == "error":
            raise Failed(value)
        return value

    def ask(self, deadline: float, what: str, *values: Any) -> Any:
        self.send(what, *values)
        return self.answer(deadline)

    def close(self) -> None:
        """Tells it that there is nothing more to do."""
        self._pipe.close()

    def stop(self) -> None:
        """Ends it and everything it started."""
        self.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()

    def _end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        wrong = [line for line in lines if "Error" in line and "Traceback" not in line]
        return f"it ended; the log says: {(wrong or lines or ['nothing'])[-1].strip()[-500:]}"


def parent() -> Connection:
    """The child's end of the pipe."""
    return Connection(int(sys.argv[1]))


def _with_benchmarks(environment: Mapping[str, str]) -> dict[str, str]:
    paths = [str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
