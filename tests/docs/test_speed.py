"""The memory of docs/speed.md is what tests/engine/test_memory.py computes."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_memory_of_the_pool(capsys):
    spec = spec_from_file_location("memory", ROOT / "tests" / "engine" / "test_memory.py")
    memory = module_from_spec(spec)
    spec.loader.exec_module(memory)
    memory.test_reserved_over_owned()
    told = re.search(r"reserved ([\d.]+) MiB, owned ([\d.]+) MiB, ratio ([\d.]+)", capsys.readouterr().out)
    reserved, owned, ratio = told.groups()
    page = (ROOT / "docs" / "speed.md").read_text()
    assert f"{reserved} MiB reserved for {owned} MiB owned" in page.replace("\n", " ")
    assert f"| {float(ratio):.3f}, computed |" in page
