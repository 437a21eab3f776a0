"""A step on the host: the managers and the rows of vLLM's V2 runner, around no model."""

import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.lora_model_runner_mixin as mixin
from vllm.lora.model_manager import AdapterLRUCache
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState

from scute.engine import model_manager
from scute.engine.arena import Arena
from scute.engine.model_manager import ScuteModelManager
from scute.engine.packing import PackedAdapter, lay_out
from scute.engine.pieces import SliceSlots
from scute.engine.rows import RowMapping, RowState, with_every_version
from scute.engine.slots import BASE_ID, ActiveSlots
from scute.engine.store import HostStore
from scute.engine.worker_manager import ScuteWorkerManager
from scute.errors import Code, Refusal
from scute.kernels.plan import BatchPlan
from scute.kernels.routes import Field, Part

SLOTS, ROWS, SLICES = 1040, 8192, 56
SECONDS = 0.01
"""Many times what a step takes on an idle machine, and a small part of what it took with a loop over slots."""


def packed(rank: int) -> PackedAdapter:
    pieces = {i: SliceSlots(a=torch.ones(rank, 8), b=torch.ones(rank, 8)) for i in range(SLICES)}
    return PackedAdapter("LoRA", *lay_out(pieces, SLICES, pinned=False), None, 0)


class Runner(mixin.LoRAModelRunnerMixin):
    """vLLM's runner as far as LoRA goes, with as many adapters as the test wants."""

    def __init__(self, slots: int, registered: int) -> None:
        manager = ScuteModelManager.__new__(ScuteModelManager)
        manager.lora_config = SimpleNamespace(max_loras=slots, max_cpu_loras=registered)
        manager._registered_adapters = AdapterLRUCache(registered, manager.deactivate_adapter)
        manager._active_adapters = AdapterLRUCache(slots, manager._deactivate_adapter)
        manager.lora_index_to_id = [None] * slots
        manager._last_mapping = manager._last_slot_layout = None
        manager.pairs, manager._has_other_layers, manager._planned = None, False, None
        manager._evictions = Counter()
        manager.slots = ActiveSlots(slots, np.zeros(0, dtype=np.int32))
        manager.plan = BatchPlan(ROWS, slots, 0, 16, "cpu")
        manager.dummy_rank = 8
        some = packed(8)
        manager.arena = Arena(slots * some.units, 1, slots, SLICES, torch.device("cpu"))
        for adapter_id in range(1, registered + 1):
            manager.add_adapter(manager._as_lora_model(adapter_id, some))
        self.manager = manager
        self.lora_manager = ScuteWorkerManager.__new__(ScuteWorkerManager)
        self.lora_manager._adapter_manager = manager
        self.lora_manager._running, self.lora_manager._version, self.lora_manager._pinned = set(), -1, set()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a step of one request for every id, each with as many rows; returns the slots of the plan's rows."""
    monkeypatch.setattr(mixin, "LoRAMapping", RowMapping)

    def run(runner: Runner, ids: list[int], rows: int = 1) -> np.ndarray:
        step(runner, *requests_of(ids), np.full(len(ids), rows, dtype=np.int32))
        plan = runner.manager.plan
        return plan.buffer[plan.offsets[Part.SLOT_OF_ROW] :][: rows * len(ids)].numpy()

    return run


def requests_of(ids: list[int]) -> tuple[RowState, list[str]]:
    """A running request for every id, and the names of the requests."""
    state = RowState(len(ids))
    for index, adapter_id in enumerate(ids):
        request = LoRARequest(f"a{adapter_id}", adapter_id, "/a") if adapter_id else None
        state.add_request(str(index), index, request)
    return state, [str(index) for index in range(len(ids))]


def step(runner: Runner, state: RowState, names: list[str], rows: np.ndarray) -> None:
    """What vLLM's V2 runner does for LoRA in every step."""
    runner._set_active_loras(*state.make_lora_inputs(names, np.arange(len(names)), rows))


def ids_of(runner: Runner, slots: np.ndarray) -> list[int]:
    return [0 if slot < 0 else runner.manager.lora_index_to_id[slot] for slot in slots]


def test_every_row_has_its_adapter(run):
    runner = Runner(3, 5)
    for ids in [[1, 0, 2, 1], [4, 5, 0, 3], [5, 3, 4], [0, 0], [1, 5, 0]]:
        slots = run(runner, ids, rows=2)
        assert ids_of(runner, slots) == list(np.repeat(ids, 2))
        table = runner.manager.arena.table
        assert (table[slots[slots >= 0].tolist(), :, Field.RANK] == 8).all()


def test_an_adapter_in_use_is_not_evicted_for_another(run):
    runner = Runner(3, 5)
    run(runner, [1, 2, 3])
    slot = runner.manager.lora_index_to_id.index(1)
    run(runner, [1, 4])
    run(runner, [1, 5])
    assert runner.manager.lora_index_to_id[slot] == 1


def test_evictions_that_nobody_asks_for_take_no_room(run, monkeypatch):
    monkeypatch.setattr(model_manager, "MOST_NAMED", 3)
    runner = Runner(1, 6)
    for adapter_id in [1, 2, 3, 4, 5, 6]:
        run(runner, [adapter_id])
    assert runner.manager.take_evictions() == {BASE_ID: 4, 5: 1}
    assert runner.manager.take_evictions() == {}


def test_the_same_rows_keep_their_plan(run, monkeypatch):
    runner = Runner(2, 3)
    run(runner, [1, 0, 2])
    plans = []
    monkeypatch.setattr(runner.manager.plan, "update", lambda *arguments, **_: plans.append(arguments))
    run(runner, [1, 0, 2])
    assert plans == []
    run(runner, [1, 2, 0])
    runner.manager.deactivate_adapter(1)
    run(runner, [1, 2, 0])
    runner.lora_manager.force_routes(shared=True, rotation=False)
    run(runner, [1, 2, 0])
    assert len(plans) == 3


def test_a_row_of_an_adapter_without_a_slot_raises(run):
    runner = Runner(2, 2)
    run(runner, [1])
    ids = np.array([1, 2], dtype=np.int32)
    with pytest.raises(LookupError, match="adapter 2"):
        runner._set_active_loras(ids, ids, {LoRARequest("a1", 1, "/a")})


def test_dummies_take_slots_and_leave_none(run):
    runner = Runner(2, 2)
    runner.manager.remove_all_adapters()
    for adapter_id in [1, 2]:
        assert runner.lora_manager.add_dummy_lora(LoRARequest("dummy", adapter_id, "/a"), rank=8)
    assert not runner.lora_manager.add_dummy_lora(LoRARequest("dummy", 1, "/a"), rank=8)
    run(runner, [1, 2])
    assert runner.manager.plan.live.all()
    assert (runner.manager.arena.table[:, :, Field.RANK] == 8).all()
    assert not runner.manager.arena.table[:, :, Field.FLAGS :].any()
    runner.lora_manager.remove_all_adapters()
    run(runner, [0])
    assert not runner.manager.plan.live.any()


def test_admission_counts_the_largest_adapters_of_a_batch():
    """Also one that was removed while a request runs on it; but not the one that is replaced."""
    runner = Runner(2, 4)
    manager, share = runner.manager, packed(8).units
    manager.store = HostStore(1.0, lambda _: None)
    manager.remove_all_adapters()
    manager.check_device_memory(1, packed(16))
    for adapter_id, rank in [(1, 8), (2, 4), (3, 4)]:
        manager.check_device_memory(adapter_id, packed(rank))
        manager.store.put(adapter_id, "/a", packed(rank))
    assert manager.arena.capacity == 2 * share
    with pytest.raises(Refusal) as refusal:
        manager.check_device_memory(4, packed(16))
    assert refusal.value.code is Code.CAPACITY_DEVICE
    manager.check_device_memory(1, packed(8))
    manager.add_adapter(manager._as_lora_model(1, manager.store.get(1, "/a")))
    manager.store.drop(1)
    with pytest.raises(Refusal):
        manager.check_device_memory(4, packed(16))
    manager.remove_adapter(1)
    manager.check_device_memory(4, packed(8))


def test_inputs_are_those_of_vllm():
    """The same ids and requests, as arrays."""
    mine, stock = RowState(4), LoraState(4)
    for state in [mine, stock]:
        for index, adapter_id in enumerate([3, 0, 7]):
            request = LoRARequest(f"a{adapter_id}", adapter_id, "/a") if adapter_id else None
            state.add_request(str(index), index, request)
    arguments = ["0", "1", "2"], np.array([2, 0, 1]), np.array([1, 3, 2])
    prompts, rows, requests = mine.make_lora_inputs(*arguments)
    assert (tuple(prompts), tuple(rows), set(requests)) == stock.make_lora_inputs(*arguments)
    assert isinstance(rows, np.ndarray)
    assert RowMapping(rows, prompts, is_prefill=True).index_mapping is rows


def test_two_versions_of_a_name_are_two_adapters_of_a_step():
    """One that was replaced, and runs on for its requests; vLLM's set of names has one of them."""
    old, new, other = LoRARequest("a", 1, "/a"), LoRARequest("a", 2, "/a"), LoRARequest("b", 3, "/b")
    state = RowState(8)
    for index, request in enumerate([old, new, None, other, old]):
        state.add_request(str(index), index, request)
    requests = state.get_activate_loras([str(index) for index in range(5)])
    assert [request.lora_int_id for request in requests] == [1, 2, 3]

    class Batch:
        def __init__(self) -> None:
            self.lora_id_to_lora_request = {1: old, 2: new}

        def _make(self, *counts: Any) -> Any:
            return (1, 2), counts, set(self.lora_id_to_lora_request.values())

        make_lora_inputs = with_every_version(_make)

    by_request, by_row, requests = Batch().make_lora_inputs(3, 4)
    assert (by_request, by_row) == ((1, 2), (3, 4))
    assert [request.lora_int_id for request in requests] == [1, 2]


@pytest.mark.parametrize(("requests", "rows"), [(64, 1), (64, 128), (1024, 1)])
def test_a_step_of_1040_slots_is_fast(run, requests: int, rows: int):
    """Also where each step has other rows, so that the plan is made anew. CPU time: other work may share the core."""
    runner = Runner(SLOTS, SLOTS)
    everyone = list(range(1, SLOTS + 1))
    run(runner, everyone)
    seconds = []
    for turn in range(9):
        state, names = requests_of(everyone[turn : turn + requests])
        start = time.thread_time()
        step(runner, state, names, np.full(requests, rows, dtype=np.int32))
        seconds.append(time.thread_time() - start)
    assert sorted(seconds)[4] < SECONDS
