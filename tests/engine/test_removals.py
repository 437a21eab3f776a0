"""Removal of an adapter at the engine core: put off while any request uses it, and never forgotten."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from scute.engine import removals


class Core:
    """An engine core whose worker only remembers what it was told."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(requests={})
        self.calls: list[tuple[str, Any]] = []
        self.held: set[int] = set()

    def use(self, name: str, adapter_id: int | None) -> None:
        lora = None if adapter_id is None else SimpleNamespace(lora_int_id=adapter_id)
        self.scheduler.requests[name] = SimpleNamespace(lora_request=lora)

    def end(self, name: str) -> None:
        del self.scheduler.requests[name]

    def _add(self, request: Any) -> bool:
        self.calls.append(("add", (request.lora_int_id, request.load_inplace)))
        self.held.add(request.lora_int_id)
        return True

    def _remove(self, adapter_id: int) -> bool:
        self.calls.append(("remove", adapter_id))
        self.held.discard(adapter_id)
        return True

    def _list(self) -> set[int]:
        return set(self.held)

    def _post_step(self, model_executed: bool) -> None:
        self.calls.append(("step", model_executed))

    post_step = removals.finish_after_steps(_post_step, _remove)
    add = removals.add_after_removals(_add, _remove)
    remove = removals.remove_when_unused(_remove)
    list = removals.list_after_removals(_list, _remove)


def adapter(adapter_id: int) -> LoRARequest:
    return LoRARequest(f"a{adapter_id}", adapter_id, f"/{adapter_id}")


@pytest.fixture
def core() -> Core:
    core = Core()
    core.add(adapter(1))
    core.use("base", None)
    return core


def test_an_unused_adapter_goes_at_once(core: Core):
    assert core.remove(1)
    assert core.calls[-1] == ("remove", 1)


def test_one_in_use_goes_with_the_next_call_after_its_last_request(core: Core):
    core.use("first", 1)
    core.use("second", 1)
    assert core.remove(1)
    core.end("first")
    assert core.list() == set(), "it is removed for whoever asks"
    assert core.held == {1}
    core.end("second")
    core.add(adapter(2))
    assert core.calls[-2:] == [("remove", 1), ("add", (2, False))], "it makes room first"


def test_one_that_comes_back_is_read_again_and_stays(core: Core):
    core.use("old", 1)
    core.remove(1)
    core.add(adapter(1))
    assert core.calls[-1] == ("add", (1, True))
    core.end("old")
    assert core.list() == {1}
    assert core.held == {1}


def test_one_in_use_goes_with_the_step_that_ends_its_last_request(core: Core):
    core.use("first", 1)
    core.remove(1)
    core.post_step(True)
    assert core.held == {1}
    core.end("first")
    core.post_step(False)
    assert core.calls[-2:] == [("step", False), ("remove", 1)]
    core.post_step(False)
    assert core.calls[-1] == ("step", False), "it goes once"
