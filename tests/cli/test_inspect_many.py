"""A store of many adapters is looked at in seconds, in memory that does not grow with their number.

    python tests/cli/test_inspect_many.py 1000

writes that many folders of a tiny model and prints the seconds and the memory of `scute inspect` on all of them.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scute.testing.adapters import write_adapter
from scute.testing.oracle import load_base
from scute.testing.tiny import tiny_llama

KINDS = ("lora-r8", "dora", "ia3", "vera-regenerated", "oft")
RUN = """
import json, resource, sys, time
from typer.testing import CliRunner
from scute.cli.main import app

def inspect(*folders):
    result = CliRunner().invoke(app, ["inspect", *folders, "--base", sys.argv[1]])
    return result.exit_code, len(result.output.splitlines())

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

few = inspect(sys.argv[2])
before, start = peak(), time.perf_counter()
code, lines = inspect(sys.argv[3])
print(json.dumps({"exit_code": code, "lines": lines, "seconds": time.perf_counter() - start, "grown": peak() - before,
                  "peak": peak(), "few": few}))
"""


def write_many(root: Path, base: Path, count: int) -> Path:
    """`count` folders of five methods; returns the folder that holds them."""
    model = load_base(base)
    for name in KINDS:
        write_adapter(model, name, root / "few" / name)
    for number in range(count):
        shutil.copytree(root / "few" / KINDS[number % len(KINDS)], root / "many" / f"{number:04}")
    return root / "many"


def inspected(root: Path, count: int) -> dict[str, float]:
    """Inspects five folders, then all of them, in a process of its own."""
    base = tiny_llama(root / "base")
    many = write_many(root, base, count)
    start = time.perf_counter()
    command = [sys.executable, "-c", RUN, str(base), str(root / "few"), str(many)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout) | {"whole_process": time.perf_counter() - start}


def test_a_hundred_folders(tmp_path):
    found = inspected(tmp_path, 100)
    assert found["exit_code"] == 0
    assert found["lines"] > 100
    assert found["grown"] < 16 * 2**20
    assert found["seconds"] < 20  # a thousand take about ten where nothing else runs


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(inspected(Path(folder), int(sys.argv[1])))
