"""Which CUDA graph a batch replays; the graphs themselves need a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest

from scute.engine import graphs
from scute.engine.options import Options

LORA = SimpleNamespace(max_loras=20)
PLAIN, VERA, OFT, STACK, NEW = 1, 2, 3, 4, 5


@pytest.fixture(autouse=True)
def admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter of each kind, and one that is not admitted yet."""
    monkeypatch.setattr(graphs, "_routes", {})
    monkeypatch.setattr(graphs, "_served", int(graphs.Routes.EVERY))
    graphs.record(PLAIN, shared=False, rotation=False)
    graphs.record(VERA, shared=True, rotation=False)
    graphs.record(OFT, shared=False, rotation=True)
    graphs.record(STACK, shared=True, rotation=True)


def dispatch(*adapters: int, dummy_run: bool = False) -> int:
    return dispatch_requests({Request(a) for a in adapters}, dummy_run)


def dispatch_requests(requests: set["Request"], dummy_run: bool = False) -> int:
    state = SimpleNamespace(get_activate_loras=lambda _: requests)
    return graphs.case_for_dispatch(LORA, state, [], dummy_run)


class Request:
    def __init__(self, adapter_id: int, load_inplace: bool = False) -> None:
        self.lora_int_id = adapter_id
        self.load_inplace = load_inplace


@pytest.mark.parametrize(
    ("adapters", "case"),
    [
        ([], 0),
        ([PLAIN], 21),
        ([PLAIN, VERA], 22),
        ([OFT, PLAIN], 23),
        ([VERA, OFT], 24),
        ([STACK], 24),
        ([PLAIN, NEW], 24),
    ],
)
def test_the_smallest_case_that_covers_the_batch(adapters: list[int], case: int):
    assert dispatch(*adapters) == case
    assert case in graphs.capture_cases(LORA, None)


def test_an_adapter_that_is_gone_is_unknown_again():
    graphs.forget(PLAIN)
    graphs.forget(77)
    assert dispatch(PLAIN) == 24


def test_an_adapter_that_is_loaded_in_place_may_be_another():
    assert dispatch_requests({Request(PLAIN, load_inplace=True)}) == 24


def test_warm_up_runs_every_route():
    assert dispatch(dummy_run=True) == 24


@pytest.mark.parametrize(
    ("options", "cases"),
    [
        ({}, [24, 23, 22, 21, 0]),
        ({"rotation_width": 0}, [22, 21, 0]),
        ({"shared_pairs": 0}, [23, 21, 0]),
        ({"rotation_width": 0, "shared_pairs": 0}, [21, 0]),
    ],
)
def test_cases_that_the_options_leave(monkeypatch, options: dict[str, Any], cases: list[int]):
    """The largest first."""
    config = SimpleNamespace(additional_config={"scute": options})
    monkeypatch.setattr(graphs, "get_current_vllm_config_or_none", lambda: config)
    assert Options.read(config).rotation_width == options.get("rotation_width", 32)
    assert graphs.capture_cases(LORA, None) == cases
    assert dispatch(NEW) == dispatch(dummy_run=True) == cases[0]
    assert graphs.capture_cases(None, None) == [0]


def test_without_lora():
    assert graphs.case_for_dispatch(None, None, [], dummy_run=True) == 0


@pytest.mark.parametrize(("case", "shared", "rotation"), [(21, False, False), (22, True, False), (24, True, True)])
def test_capture_makes_the_routes_of_its_case_live(case: int, shared: bool, rotation: bool):
    calls: list[Any] = []
    runner = SimpleNamespace(lora_manager=SimpleNamespace(force_routes=lambda **routes: calls.append(routes)))
    hook = graphs.capture_hook(LORA, runner, lambda *_: lambda *batch: calls.append(batch))
    hook(case, 4, 8)
    assert calls == [(case, 4, 8), {"shared": shared, "rotation": rotation}]
    hook(0, 4, 8)
    assert calls[2:] == [(0, 4, 8)]
