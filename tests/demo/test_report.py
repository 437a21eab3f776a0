"""The report: which rows pass, and that its table and its JSON hold the same rows."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from scute.agreement import Agreement
from scute.demo.footprint import Footprint
from scute.demo.pool import Tenant
from scute.demo.report import BASE_BOUND, RATIO_BOUND, adapter_row, base_row, to_json, to_table

TENANT = Tenant("vera", "VeRA", Path("vera"))
FOOTPRINT = Footprint(("d", "e"), 2048)


def row(ratio):
    return adapter_row(TENANT, FOOTPRINT, Agreement(effect=2.0, error=2.0 * ratio), "an answer")


@pytest.mark.parametrize(("share", "passes"), [(0.9, True), (1.1, False)])
def test_a_row_passes_up_to_its_bound(share, passes):
    assert row(share * RATIO_BOUND).within_bound is passes
    assert base_row(share * BASE_BOUND, "").within_bound is passes


def test_an_adapter_without_effect_fails():
    assert not adapter_row(TENANT, FOOTPRINT, Agreement(effect=0.0, error=0.0), "").within_bound


def test_json_holds_the_rows_and_the_bounds():
    report = json.loads(to_json([base_row(1e-6, "yes"), row(1e-4)]))
    assert report["ratio_bound"] == RATIO_BOUND
    assert report["base_bound"] == BASE_BOUND
    base, vera = report["rows"]
    assert (base["name"], base["ratio"], base["error"]) == ("base", None, 1e-6)
    assert (vera["method"], vera["live_slots"], vera["owned_bytes"]) == ("VeRA", ["d", "e"], 2048)
    assert vera["ratio"] == pytest.approx(1e-4)


def test_table_fits_120_columns():
    screen = io.StringIO()
    Console(file=screen, width=120).print(to_table([base_row(1e-6, "a long answer " * 9), row(1e-4)]))
    lines = screen.getvalue().splitlines()
    assert any("vera" in line and "d e" in line and "2 KiB" in line and "1.0e-04" in line for line in lines)
    assert max(map(len, lines)) <= 120
