"""Two tensor-parallel ranks: what fails on one fails on both, none waits for the other, and both hold the same."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
from conftest import World, ask, disagreement, start, stop
from vllm.lora.request import LoRARequest

from scute.errors import Code, Refusal
from scute.testing.tiny import tiny_prompts

pytestmark = pytest.mark.engine

BOUND = 1e-4
NAMES = ["lora-r8", "vera", "dora", "ia3", "rslora-r16"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def llm(world) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        environment.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the functions below
        engine = start(world, dtype="float32", tensor_parallel_size=2, max_loras=2, max_cpu_loras=2)
        yield engine
        stop(engine)


def spoil(worker: Any, rank: int, kind: str) -> None:
    """Have the next adapter fail on one rank, in the middle of its admission."""
    from scute.engine import admit
    from scute.errors import Code, Refusal

    original = admit._pack

    def fail_once(*args: Any) -> Any:
        admit._pack = original
        if worker.rank != rank:
            return original(*args)
        raise MemoryError("no memory") if kind == "error" else Refusal(Code.TENSOR_NOT_FINITE, "on one rank.")

    admit._pack = fail_once


def look(worker: Any) -> Any:
    manager = worker.model_runner.lora_manager._adapter_manager
    return list(manager.store.adapters()), list(manager.lora_index_to_id), sorted(manager.registered_ids())


def check(world: World, llm: Any, requests: dict[str, LoRARequest], names: list[str]) -> None:
    served = ask(llm, [(requests[name], prompt) for name in names for prompt in tiny_prompts(2)])
    for index, name in enumerate(names):
        assert disagreement(world, name, served[2 * index : 2 * index + 2]) <= BOUND, name


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["refusal", "error"])
def test_what_fails_on_one_rank_fails_on_both(world, llm, rank: int, kind: str):
    before = llm.collective_rpc(look)
    request = LoRARequest(f"{kind}-{rank}", 50 + 2 * rank + (kind == "error"), world.folders["dora"])
    llm.collective_rpc(spoil, args=(rank, kind))
    with pytest.raises(Refusal if kind == "refusal" else Exception) as error:
        ask(llm, [(request, tiny_prompts(1)[0])])
    if kind == "refusal":
        assert error.value.code is Code.TENSOR_NOT_FINITE, "the reason, not that another rank has one"
    else:
        assert "MemoryError: no memory" in str(error.value)
    assert llm.collective_rpc(look) == before
    check(world, llm, {"dora": request}, ["dora"])


def test_both_ranks_hold_the_same_in_the_same_order(world, llm):
    """Names are in sets on the way to the workers, which every process iterates in another order."""
    requests = {name: LoRARequest(name, 10 + i, world.folders[name]) for i, name in enumerate(NAMES)}
    for seed in range(6):
        names = random.Random(seed).sample(NAMES, 4)
        check(world, llm, requests, names)
        first, second = llm.collective_rpc(look)
        assert first == second
