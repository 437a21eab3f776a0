"""docs/demand.md names tests that exist, and every row that a test has in its ids."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "demand.md").read_text()
DEMANDS, _, REASONS = PAGE.partition("\n## Refused by design\n")
FILES = {path.stem: path for path in TESTS.rglob("test_*.py")}


def functions(stem: str) -> set[str]:
    tree = ast.parse(FILES[stem].read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def rows() -> dict[int, str]:
    """The rows of the tables of demands: number to the whole line."""
    return {int(line.split("|")[1]): line for line in DEMANDS.splitlines() if re.match(r"\| \d+ \|", line)}


def test_every_test_that_is_named_exists():
    named = set(re.findall(r"`(test_\w+)::(test_\w+)`", PAGE))
    assert len(named) > 50
    assert {f"{stem}::{name}" for stem, name in named if stem not in FILES or name not in functions(stem)} == set()


def test_every_row_has_a_test_or_says_that_it_has_none():
    without = [row for row, line in rows().items() if "::" not in line]
    assert all("not yet" in rows()[row] or "no test" in rows()[row] for row in without)
    assert len(rows()) == len(re.findall(r"^\| \d+ \|", DEMANDS, re.MULTILINE))


def test_every_row_of_the_tests_names_their_file():
    """A test with a row in its ids is one of those that the page has for the row."""
    others = ["test_adalora_exact", "test_any_rank", "test_packed_base"]
    for stem in [*(stem for stem in FILES if stem.startswith("test_demand_")), *others]:
        numbers = {int(number) for number in re.findall(r"\brow(\d+)-", FILES[stem].read_text())}
        numbers |= {int(number) for number in re.findall(r"def test_row(\d+)_", FILES[stem].read_text())}
        assert numbers
        assert [row for row in sorted(numbers) if f"`{stem}::" not in rows()[row]] == []


def test_rows_refused_by_design_have_a_reason():
    listed = {int(n) for numbers in re.findall(r"^\| ([\d, ]+) \|", REASONS, re.MULTILINE) for n in numbers.split(",")}
    assert {row for row, line in rows().items() if "by design" in line} == listed
