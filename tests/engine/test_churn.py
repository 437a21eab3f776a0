"""Adapters that come, go and come back in one engine with two slots: no answer may show another tenant."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cycles
import pytest
from churn import BOUNDS, Churn, Judge
from conftest import World, ask, disagreement, stack_disagreement, start, stop
from damage import DAMAGES, write_damaged
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from scute.admission.stacks import stack_path
from scute.errors import Code, Refusal
from scute.testing.adapters import AMPLIFIED
from scute.testing.tiny import tiny_prompts

pytestmark = pytest.mark.engine

BOUND = 1e-4
NAMES = list(AMPLIFIED)
ONE_OF_EACH_METHOD = ["lora-r8", "oft", "vera", "dora", "ia3"]


@pytest.fixture(scope="module")
def llm(world) -> Iterator[Any]:
    """Two slots, two adapters in vLLM's cache, and steps that cut every prompt of these tests in pieces."""
    engine = start(
        world,
        dtype="float32",
        max_loras=2,
        max_cpu_loras=2,
        max_num_batched_tokens=64,
        block_size=32,
        enable_prefix_caching=True,
    )
    yield engine
    stop(engine)


@pytest.fixture(scope="module")
def folders(world, tmp_path_factory) -> dict[str, Path]:
    """Copies of the adapter folders that a test may delete."""
    root = tmp_path_factory.mktemp("churn")
    return {name: Path(shutil.copytree(folder, root / name)) for name, folder in world.folders.items()}


@pytest.fixture(scope="module")
def requests(folders) -> dict[str | None, Any]:
    adapters = {name: LoRARequest(name, 10 + i, str(folder)) for i, (name, folder) in enumerate(folders.items())}
    return {None: None} | adapters


def check(world: World, llm: Any, requests: dict[str | None, Any], names: list[str | None], **options: Any) -> None:
    """Serve two prompts under every name, in the order given, and hold each name against the PEFT library."""
    prompts = options.pop("prompts", None) or tiny_prompts(2, length=90)
    rows = [(name, prompt) for prompt in prompts for name in names]
    served = ask(llm, [(requests[name], prompt) for name, prompt in rows], **options)
    assert [row["tokens"][: len(prompt)] for row, (_, prompt) in zip(served, rows, strict=True)] == [p for _, p in rows]
    errors = {
        name: disagreement(world, name, [row for row, (mine, _) in zip(served, rows, strict=True) if mine == name])
        for name in dict.fromkeys(names)
    }
    assert {name: error for name, error in errors.items() if not error <= BOUND} == {}


@pytest.mark.parametrize("seed", range(4))
def test_every_adapter_in_every_round(world, llm, requests, seed: int):
    names = [*NAMES, None, None]
    random.Random(seed).shuffle(names)
    check(world, llm, requests, names)


@pytest.mark.parametrize("first", [None, "oft"])
def test_prefixes_are_not_shared_between_tenants(world, llm, requests, first: str | None):
    """The same prompts under every name; whoever comes first fills the cache."""
    prefix = tiny_prompts(1, length=64, seed=1)[0]
    prompts = [prefix + tail for tail in tiny_prompts(2, length=20, seed=2)]
    names = [first, *(name for name in [None, *ONE_OF_EACH_METHOD] if name != first)]
    for _ in range(2):
        check(world, llm, requests, names, prompts=prompts, prompt_logprobs=False)


def test_the_prefix_cache_is_used(llm, requests):
    """Otherwise the test above shows nothing."""
    prompt = {"prompt_token_ids": tiny_prompts(1, length=64, seed=3)[0]}
    parameters = SamplingParams(max_tokens=1, detokenize=False)
    outputs = [llm.generate([prompt], parameters, lora_request=requests["dora"], use_tqdm=False)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 32]


def test_another_method_under_the_same_id(world, llm, folders):
    """Each takes over a slot that the method before it has written more of, or other parts of."""
    for name in [*ONE_OF_EACH_METHOD, *reversed(ONE_OF_EACH_METHOD)]:
        llm.llm_engine.remove_lora(7)
        check(world, llm, {name: LoRARequest(name, 7, str(folders[name])), None: None}, [name, None])


def test_another_method_in_place(world, llm, folders):
    for name in [*ONE_OF_EACH_METHOD, *reversed(ONE_OF_EACH_METHOD)]:
        request = LoRARequest(name, 8, str(folders[name]), load_inplace=True)
        check(world, llm, {name: request, None: None}, [name, None])


def test_the_same_batch_after_a_reload(world, llm, folders):
    """vLLM makes its mapping anew if the rows or the slots differ from the last step's; here neither do."""
    prompt = tiny_prompts(1)[0]
    for name in [*ONE_OF_EACH_METHOD, *reversed(ONE_OF_EACH_METHOD)]:
        request = LoRARequest("reloaded", 6, str(folders[name]), load_inplace=True)
        assert disagreement(world, name, ask(llm, [(request, prompt)], max_tokens=1)) <= BOUND, name


def test_two_adapters_of_one_name_in_one_batch(world, llm, folders):
    """As when a name is unloaded while it answers, and loaded anew: vLLM's set of a step's requests would hold one."""
    prompt = tiny_prompts(1)[0]
    adapters = {name: LoRARequest("same", 200 + i, str(folders[name])) for i, name in enumerate(["oft", "dora"])}
    rows = ask(llm, [(adapter, prompt) for adapter in adapters.values()])
    for name, row in zip(adapters, rows, strict=True):
        assert disagreement(world, name, [row]) <= BOUND, name


def test_streams_keep_the_adapter_that_they_began_with(llm, world, tmp_path):
    """`python benchmarks/churn.py` runs this for minutes."""
    folders = {name: Path(folder) for name, folder in world.folders.items()}
    churn = Churn(llm, folders, tmp_path, seed=1)
    churn.run(seconds=8)
    for tenant in churn.tenants:
        if tenant.request is not None:
            churn.unload(tenant)
    verdict = Judge(llm, folders, churn.prompts).verdict(churn.answers, BOUNDS["float32"])
    assert verdict["first_wrong"] == []
    assert verdict["answers"] == churn.counts["requests"] >= churn.streams
    for event in ("reloads", "reloads_in_place_while_running", "unloads_while_running", "prompts_from_cache"):
        assert churn.counts[event] > 0, event


def test_cycles_leave_nothing_in_memory(llm, world):
    """`python benchmarks/cycles.py` runs a thousand."""
    folders = {name: Path(folder) for name, folder in world.folders.items()}
    for label, resident in cycles.run(llm, folders, 66, first_id=100_000).items():
        assert cycles.growth(resident, warm=22) < cycles.BOUND, label


@pytest.mark.parametrize("prompt_logprobs", [True, pytest.param(False, id="with-prefix-cache")])
@pytest.mark.parametrize("how", ["removed", "in-place"])
def test_another_adapter_in_the_same_folder(world, llm, tmp_path, how: str, prompt_logprobs: bool):
    """The same name, id and path, as when a training run writes over its last checkpoint."""
    for name in ["lora-r8", "oft"]:
        shutil.rmtree(tmp_path / "checkpoint", ignore_errors=True)
        shutil.copytree(world.folders[name], tmp_path / "checkpoint")
        if how == "removed":
            llm.llm_engine.remove_lora(5)
        request = LoRARequest("latest", 5, str(tmp_path / "checkpoint"), load_inplace=how == "in-place")
        check(world, llm, {name: request}, [name], prompt_logprobs=prompt_logprobs)


@pytest.mark.parametrize("prompt_logprobs", [True, pytest.param(False, id="with-prefix-cache")])
def test_another_adapter_in_a_folder_of_a_stack(world, llm, tmp_path, prompt_logprobs: bool):
    """And the same folders in another order, which is another adapter."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(world.folders["ia3"], first)
    prompts = tiny_prompts(2, length=90)
    for name in ["lora-r8", "dora", "oft"]:
        shutil.rmtree(second, ignore_errors=True)
        shutil.copytree(world.folders[name], second)
        for order in ([first, second], [second, first]):
            request = LoRARequest("stack", 5, stack_path(order), load_inplace=True)
            served = ask(llm, [(request, prompt) for prompt in prompts], prompt_logprobs=prompt_logprobs)
            assert stack_disagreement(world, order, served) <= BOUND, (name, order)


def test_the_dummy_batch_of_an_idle_rank(world, llm, requests):
    """It removes every adapter from vLLM's caches, and its own adapters have the ids 1 and 2."""
    check(world, llm, requests, ["vera", "oft", None])
    llm.collective_rpc("execute_dummy_batch")
    assert not llm.llm_engine.list_loras()
    check(world, llm, requests, ["vera", None, "oft"])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_folder_is_refused_and_nobody_else_is_hurt(world, llm, requests, folders, tmp_path, damage: str):
    bad = LoRARequest("bad", 99, str(write_damaged(folders["lora-r8"], damage, tmp_path / damage)))
    prompt = tiny_prompts(1)[0]
    with pytest.raises(Refusal) as refusal:
        ask(llm, [(None, prompt), (requests["dora"], prompt), (bad, prompt)])
    assert refusal.value.code is DAMAGES[damage][1]
    assert not llm.llm_engine.has_unfinished_requests()
    check(world, llm, requests, ["dora", None, "ia3"])


@pytest.mark.parametrize("path", ["/nowhere/at/all", "nowhere/near", "./nowhere"])
def test_a_missing_folder_is_refused(llm, path: str):
    with pytest.raises(Refusal) as refusal:
        ask(llm, [(LoRARequest("missing", 98, path), tiny_prompts(1)[0])])
    assert refusal.value.code is Code.FOLDER_MISSING
    assert path.removeprefix("./") in str(refusal.value)


def test_a_refused_reload_leaves_the_old_adapter(world, llm, folders, tmp_path):
    good = LoRARequest("dora", 95, str(folders["dora"]))
    check(world, llm, {"dora": good, None: None}, ["dora", None])
    bad = write_damaged(folders["dora"], "nan", tmp_path / "bad")
    with pytest.raises(Refusal):
        ask(llm, [(LoRARequest("bad", 95, str(bad), load_inplace=True), tiny_prompts(1)[0])])
    check(world, llm, {"dora": good, None: None}, ["dora", None])


def test_a_refused_adapter_is_admitted_once_it_is_repaired(world, llm, folders, tmp_path):
    folder = write_damaged(folders["dora"], "nan", tmp_path / "dora")
    request = LoRARequest("repaired", 97, str(folder))
    with pytest.raises(Refusal):
        ask(llm, [(request, tiny_prompts(1)[0])])
    shutil.rmtree(folder)
    shutil.copytree(folders["dora"], folder)
    check(world, llm, {"dora": request}, ["dora"])


def test_one_id_is_one_adapter(world, llm, folders):
    """vLLM would answer with whichever adapter the id had first."""
    first, second = (LoRARequest(name, 96, str(folders[name])) for name in ["dora", "oft"])
    check(world, llm, {"dora": first}, ["dora"])
    with pytest.raises(ValueError, match="lora_int_id 96"):
        ask(llm, [(second, tiny_prompts(1)[0])])
    check(world, llm, {"dora": first}, ["dora"])


def test_folders_may_go_once_their_adapters_are_admitted(world, llm, requests, folders):
    check(world, llm, requests, NAMES)
    for folder in folders.values():
        shutil.rmtree(folder)
    llm.collective_rpc("execute_dummy_batch")
    for _ in range(2):
        check(world, llm, requests, [*NAMES, None])


def test_reloading_a_folder_that_is_gone_is_refused(world, llm, requests):
    gone = requests["dora"]
    with pytest.raises(Refusal) as refusal:
        ask(llm, [(LoRARequest("dora", gone.lora_int_id, gone.lora_path, load_inplace=True), tiny_prompts(1)[0])])
    assert refusal.value.code is Code.FOLDER_MISSING
    check(world, llm, requests, ["dora", None])


def test_a_running_request_outlives_the_removal_of_its_adapter(world, llm, requests):
    engine = llm.llm_engine
    parameters = SamplingParams(temperature=0, logprobs=0, max_tokens=12, ignore_eos=True, detokenize=False)
    engine.add_request("removed", {"prompt_token_ids": tiny_prompts(1)[0]}, parameters, lora_request=requests["oft"])
    engine.step()
    engine.remove_lora(requests["oft"].lora_int_id)
    while engine.has_unfinished_requests():
        engine.step()
    check(world, llm, requests, ["dora", None])
