"""The page of metrics and the dashboard name what there is."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from scute.engine.metrics import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
DASHBOARD = json.loads((ROOT / "dashboards" / "scute.json").read_text())

LABELS = {f.name: set(f.labels) for f in FAMILIES if f.kind != "histogram"} | {
    f"{f.name}_{part}": set(f.labels) | ({"le"} if part == "bucket" else set())
    for f in FAMILIES
    if f.kind == "histogram"
    for part in ("bucket", "count", "sum")
}
VLLM = {
    "vllm:num_requests_running": {"model_name", "engine"},
    "vllm:num_requests_waiting": {"model_name", "engine"},
    "vllm:generation_tokens_total": {"model_name", "engine"},
}
"""What the dashboard shows of vLLM's own."""

PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
EXPRESSIONS = [(p["title"], t["expr"]) for p in PANELS for t in p["targets"]]


def test_the_page_has_every_metric():
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| ([^|]+) \| (\w+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert rows == [(f.name, f.kind, ", ".join(f.labels), f.unit, f.meaning) for f in FAMILIES]


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_the_dashboard_asks_for_metrics_and_labels_that_exist(title, expression):
    known = LABELS | VLLM
    named = re.findall(r"\b(?:vllm|scute):\w+", expression)
    assert named, title
    assert set(named) <= known.keys()
    common = set.intersection(*[known[name] for name in named])
    by = [label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")]
    matched = re.findall(r"[{ ](\w+)=~?\"", expression)
    assert {*by, *matched} <= common
    assert matched.count("model_name") == len(named)
    assert expression.count("(") == expression.count(")")


def test_rates_are_of_counters_and_nothing_else():
    for title, expression in EXPRESSIONS:
        rated = set(re.findall(r"(?:rate|increase)\((\S+?)\{", expression))
        named = set(re.findall(r"\b(?:vllm|scute):\w+", expression))
        counters = {name for name in named if name.endswith(("_total", "_bucket"))}
        instant = title == "Adapters"
        assert rated == (set() if instant else counters), title


def test_legends_use_labels_that_the_query_keeps():
    for panel in PANELS:
        for target in panel["targets"]:
            kept = {x for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for x in group.split(", ")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


def test_the_panels_are_told_apart_and_do_not_overlap():
    assert len({panel["id"] for panel in PANELS}) == len({panel["title"] for panel in PANELS}) == len(PANELS)
    places = [panel["gridPos"] for panel in PANELS]
    assert all(p["x"] >= 0 and p["x"] + p["w"] <= 24 for p in places)
    for one, other in combinations(places, 2):
        apart = [one[a] + one[s] <= other[a] or other[a] + other[s] <= one[a] for a, s in (("x", "w"), ("y", "h"))]
        assert any(apart)


def test_the_dashboard_shows_every_metric_of_adapters():
    named = {name for _, expression in EXPRESSIONS for name in re.findall(r"\b(?:vllm|scute):\w+", expression)}
    families = {f.name for f in FAMILIES if f.name in named or {f"{f.name}_sum", f"{f.name}_bucket"} & named}
    assert families == {f.name for f in FAMILIES}


def test_the_dashboard_can_be_imported_anywhere():
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "model"}
    assert variables["datasource"]["type"] == "datasource"
    sources = [panel["datasource"] for panel in PANELS] + [t["datasource"] for p in PANELS for t in p["targets"]]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert "id" not in DASHBOARD, "an import gives it one"
