"""README.md and docs/speed.md show what the committed rows say."""

from pathlib import Path

import pytest
import rows
from serving import bounds, summary

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))


@pytest.mark.skipif(not RESULTS, reason="no serving times are committed")
def test_readme_has_the_table_of_the_committed_rows():
    shown = summary.between_markers((ROOT / "README.md").read_text())
    assert shown == summary.table(rows.read(RESULTS)), "run: python benchmarks/serve.py table --write RESULTS"


@pytest.mark.skipif(not RESULTS, reason="no serving times are committed")
def test_speed_page_has_the_bounds_of_the_committed_rows():
    shown = summary.between_markers((ROOT / "docs" / "speed.md").read_text())
    assert shown == bounds.page(RESULTS), "run: python benchmarks/serve.py table --write benchmarks/results/*.jsonl"


def test_readme_has_a_place_for_the_table():
    summary.between_markers((ROOT / "README.md").read_text())
