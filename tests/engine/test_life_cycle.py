"""The calls do what their names say, in one engine with few slots: where an adapter is, and that it is gone."""

import itertools
import random
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from conftest import World, _row, ask, disagreement, start, stop
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from scute.engine.offline import Row
from scute.errors import Code, Refusal
from scute.testing.tiny import tiny_prompts

pytestmark = pytest.mark.engine

BOUND = 1e-4
METHODS = ["lora-r8", "oft", "vera", "dora", "ia3"]
NUMBERS = itertools.count(100)
SLOTS = 4
NOTHING: dict[str, Any] = {
    "host": set(),
    "cache": set(),
    "device": set(),
    "pinned": set(),
    "bytes": 0,
    "pairs": 0,
    "graphs": 0,
}

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def llm(world) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the function that looks into the worker
        engine = start(
            world, dtype="float32", max_loras=SLOTS, max_cpu_loras=SLOTS, block_size=32, enable_prefix_caching=True
        )
        yield engine
        stop(engine)


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    """Every test starts and ends with an engine that holds no adapter."""
    yield
    for adapter_id in where(llm)["host"]:
        llm.llm_engine.remove_lora(adapter_id)
    assert where(llm) == NOTHING


def look(worker: Any) -> dict[str, Any]:
    """Ids by tier; bytes of the arena that are taken; shared pairs that are held; notes for the graphs."""
    from scute.engine import graphs

    manager = worker.model_runner.lora_manager._adapter_manager
    return {
        "host": set(manager.store.adapters()),
        "cache": manager.registered_ids(),
        "device": {adapter_id for adapter_id in manager.lora_index_to_id if adapter_id is not None},
        "pinned": set(manager._active_adapters.pinned_items),
        "bytes": manager.arena.capacity - manager.arena._extents.free,
        "pairs": sum(bool(users) for users in manager.pairs._users),
        "graphs": len(graphs._routes),
    }


def where(llm: Any) -> dict[str, Any]:
    """What the worker holds now. The engine core does nothing else for this call."""
    (found,) = llm.collective_rpc(look)
    return found


def adapter(world: World, name: str, path: Path | None = None) -> LoRARequest:
    number = next(NUMBERS)
    return LoRARequest(f"{name}-{number}", number, str(path or world.folders[name]))


def submit(llm: Any, name: str, request: LoRARequest, prompt: list[int], max_tokens: int = 24) -> None:
    parameters = SamplingParams(temperature=0, logprobs=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters, lora_request=request)


def finish(llm: Any) -> list[Row]:
    rows = []
    while llm.llm_engine.has_unfinished_requests():
        rows += [_row(output) for output in llm.llm_engine.step() if output.finished]
    return rows


@pytest.mark.parametrize("name", METHODS)
def test_a_removed_adapter_leaves_nothing(world, llm, name: str):
    request = adapter(world, name)
    assert disagreement(world, name, ask(llm, [(request, tiny_prompts(1)[0])])) <= BOUND
    held = where(llm)
    assert held["host"] == held["cache"] == held["device"] == {request.lora_int_id}
    assert (held["bytes"] > 0, held["pairs"]) == (True, int(name == "vera"))
    llm.llm_engine.remove_lora(request.lora_int_id)
    assert where(llm) == NOTHING


@pytest.mark.parametrize("name", ["vera", "oft"])
def test_one_in_use_goes_with_its_last_request_and_no_further_call(world, llm, name: str):
    request, prompts = adapter(world, name), tiny_prompts(2)
    submit(llm, "short", request, prompts[0], 8)
    submit(llm, "long", request, prompts[1], 40)
    llm.llm_engine.step()
    llm.llm_engine.remove_lora(request.lora_int_id)
    assert where(llm)["host"] == where(llm)["device"] == {request.lora_int_id}
    assert disagreement(world, name, finish(llm)) <= BOUND
    assert where(llm) == NOTHING


def test_one_in_use_goes_when_its_last_request_is_aborted(world, llm):
    request = adapter(world, "dora")
    submit(llm, "aborted", request, tiny_prompts(1)[0], 200)
    llm.llm_engine.step()
    llm.llm_engine.remove_lora(request.lora_int_id)
    llm.llm_engine.abort_request(["aborted"])
    end = time.monotonic() + 30
    while where(llm) != NOTHING and time.monotonic() < end:
        time.sleep(0.05)
    assert where(llm) == NOTHING


def test_the_host_keeps_all_and_the_device_the_last_used(world, llm, tmp_path):
    """The folders are gone by then: what comes back does so without the disk."""
    requests = {
        name: adapter(world, name, Path(shutil.copytree(world.folders[name], tmp_path / name))) for name in METHODS
    }
    prompt = tiny_prompts(1)[0]
    ids = {name: request.lora_int_id for name, request in requests.items()}
    for name in METHODS:
        ask(llm, [(requests[name], prompt)])
        shutil.rmtree(tmp_path / name)
    assert where(llm)["host"] == set(ids.values())
    assert where(llm)["device"] == {ids[name] for name in METHODS[1:]}
    for name, evicted in [("oft", None), ("lora-r8", "vera"), ("ia3", None), ("vera", "dora"), ("dora", "oft")]:
        before = where(llm)["device"]
        assert disagreement(world, name, ask(llm, [(requests[name], prompt)])) <= BOUND, name
        gone = before - where(llm)["device"]
        assert gone == (set() if evicted is None else {ids[evicted]}), name
    assert where(llm)["host"] == set(ids.values())


def test_names_are_reloaded_while_32_requests_decode(world, llm):
    """As the server replaces an adapter: under an id of its own, and the old one goes when its requests end."""
    chance, engine = random.Random(0), llm.llm_engine
    served = {f"tenant-{number}": (METHODS[number], adapter(world, METHODS[number])) for number in range(3)}
    recipes: dict[str, str] = {}
    rows: dict[str, list[Row]] = defaultdict(list)
    prompts = tiny_prompts(160, length=12)
    while prompts or engine.has_unfinished_requests():
        while prompts and engine.get_num_unfinished_requests() < 32:
            recipe, request = served[chance.choice(list(served))]
            recipes[f"r{len(prompts)}"] = recipe
            submit(llm, f"r{len(prompts)}", request, prompts.pop(), chance.choice([8, 24, 40]))
        for output in engine.step():
            if output.finished:
                rows[recipes[output.request_id]].append(_row(output))
        if prompts and chance.random() < 0.3:
            name = chance.choice(list(served))
            _, old = served[name]
            recipe = chance.choice(METHODS)
            new = LoRARequest(name, next(NUMBERS), world.folders[recipe])
            engine.add_lora(new)
            served[name] = recipe, new
            engine.remove_lora(old.lora_int_id)
    assert sum(map(len, rows.values())) == len(recipes) == 160
    assert set(rows) == set(METHODS)
    assert {recipe: error for recipe in rows if (error := disagreement(world, recipe, rows[recipe])) > BOUND} == {}
    assert where(llm)["host"] <= {request.lora_int_id for _, request in served.values()}


def test_memory_is_flat_over_1000_loads(world, llm):
    """Resident memory of all processes, under 2 % after the first 100."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]

    def cycle(count: int) -> int:
        for number in range(count):
            request = adapter(world, METHODS[number % len(METHODS)])
            assert llm.llm_engine.add_lora(request)
            assert llm.llm_engine.remove_lora(request.lora_int_id)
        return sum(process.memory_info().rss for process in processes)

    before = cycle(100)
    after = cycle(900)
    assert after < 1.02 * before, f"{before / 2**20:.1f} MiB, then {after / 2**20:.1f} MiB"
    print(f"resident memory: {before / 2**20:.1f} MiB after 100 loads, {after / 2**20:.1f} MiB after 1,000")


@pytest.mark.parametrize("is_used", [False, True])
def test_a_pin_stays_with_the_id_that_is_replaced(world, llm, is_used: bool):
    engine, request = llm.llm_engine, adapter(world, "oft")
    engine.add_lora(request)
    engine.pin_lora(request.lora_int_id)
    if is_used:
        submit(llm, "old", request, tiny_prompts(1)[0])
    new = LoRARequest("new", request.lora_int_id, str(world.folders["lora-r8"]), load_inplace=True)
    engine.add_lora(new)
    (pinned,) = where(llm)["pinned"]
    assert (pinned != request.lora_int_id) is is_used
    assert all(disagreement(world, "oft", [row]) <= BOUND for row in finish(llm))
    assert disagreement(world, "lora-r8", ask(llm, [(new, tiny_prompts(1)[0])])) <= BOUND
    assert where(llm)["device"] == where(llm)["pinned"] == {pinned}
    engine.remove_lora(request.lora_int_id)


def test_slots_that_are_all_pinned_are_lent_to_a_step_alone(world, llm):
    """Adapters that were loaded before have to be served: vLLM would end the engine."""
    engine = llm.llm_engine
    before, *pinned = [adapter(world, "lora-r8") for _ in range(SLOTS + 1)]
    for request in (before, *pinned):
        engine.add_lora(request)
    for request in pinned:
        engine.pin_lora(request.lora_int_id)
    submit(llm, "running", pinned[0], tiny_prompts(1)[0])
    old = where(llm)
    for refused in (
        LoRARequest("new", pinned[0].lora_int_id, world.folders["oft"], load_inplace=True),
        adapter(world, "oft"),
    ):
        with pytest.raises(Refusal, match="max-loras = 4 slots are pinned") as refusal:
            engine.add_lora(refused)
        assert refusal.value.code is Code.CAPACITY_PINNED
    assert where(llm) == old
    submit(llm, "lent", before, tiny_prompts(1)[0])
    assert disagreement(world, "lora-r8", finish(llm)) <= BOUND
    assert len(where(llm)["pinned"]) == SLOTS - 1
    assert pinned[0].lora_int_id in where(llm)["pinned"]
    assert disagreement(world, "lora-r8", ask(llm, [(request, tiny_prompts(1)[0]) for request in pinned])) <= BOUND
    assert where(llm)["pinned"] == {request.lora_int_id for request in pinned}
    for request in (before, *pinned):
        engine.remove_lora(request.lora_int_id)
