"""The OpenAI server: adapters are loaded, refused with a sentence and unloaded while it serves."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from conftest import World, disagreement, stack_disagreement
from damage import DAMAGES, write_damaged
from http_server import Server, serve

from scute.admission import compile_folder
from scute.admission.base_folder import read_base
from scute.admission.stacks import stack_path
from scute.errors import Code
from scute.testing.adapters import write_adapter
from scute.testing.tiny import tiny_prompts

pytestmark = pytest.mark.engine

BOUND = 1e-4
STATIC = ["dora", "oft"]
STACK = ("ia3", "lora-r3")
LOADED = ["lora-r8", "ia3", "vera", "oft-cayley", "dora-odd"]


@pytest.fixture(scope="module")
def server(world, tmp_path_factory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("http")
    compile_folder(Path(world.folders["oft"]), root / "oft", read_base(world.base))
    modules = {name: world.folders[name] for name in STATIC} | {"oft": root / "oft"}
    modules["stack"] = stack_path([world.folders[name] for name in STACK])
    modules["turned"] = 'scute+stack:["oft", "stack"]'
    with serve(world.base, root, modules, {"shared_pairs": 1}) as running:
        yield running


def check(world: World, server: Server, names: list[str]) -> None:
    """Hold completions of the models against the PEFT library; "base" is the base model."""
    prompts = tiny_prompts(2)
    for name in names:
        rows = [server.complete(name, prompt) for prompt in prompts]
        assert disagreement(world, None if name == "base" else name, rows) <= BOUND, name


def test_adapters_of_the_command_line(world, server):
    assert server.models() == ["base", *STATIC, "stack", "turned"]
    check(world, server, ["base", *STATIC])


def sample(metrics: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return metrics[name, frozenset(labels.items())]


def labels_of(metrics: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, label: str) -> set[str]:
    return {dict(labels).get(label, "") for found, labels in metrics if found == name}


def test_metrics_tell_what_is_loaded(world, server):
    """The requests of the test before are counted, without a request of their own in between."""
    found = server.metrics()
    for name, method, rank in (("dora", "DoRA", "16"), ("oft", "OFT", "0")):
        loaded = {"adapter_name": name, "level": "gpu", "pinned": "false", "rank": rank}
        assert sample(found, "vllm:lora_adapter_loaded", **loaded) == 1
        assert sample(found, "scute:adapter_info", adapter_name=name, method=method) == 1
        sizes = {t: sample(found, "scute:adapter_bytes", adapter_name=name, tier=t) for t in ("disk", "host", "device")}
        assert sizes["device"] == sizes["host"] > 0
        assert sample(found, "scute:adapter_load_seconds_count", adapter_name=name) == 1
        assert sample(found, "scute:adapter_prompt_tokens_total", adapter_name=name) == sum(map(len, tiny_prompts(2)))
        assert sample(found, "scute:adapter_generation_tokens_total", adapter_name=name) == 2 * 8
        assert sample(found, "scute:adapter_evictions_total", adapter_name=name) == 1  # for the stacks, loaded last
    file = Path(world.folders["dora"]) / "adapter_model.safetensors"
    assert sample(found, "scute:adapter_bytes", adapter_name="dora", tier="disk") == file.stat().st_size
    assert labels_of(found, "vllm:lora_adapter_loaded", "adapter_name") == {*STATIC, "stack", "turned"}
    assert sample(found, "vllm:num_gpu_loaded_lora_adapters") == sample(found, "vllm:max_gpu_lora_adapters") == 2
    assert sample(found, "vllm:lora_adapter_load_seconds_count") == 4
    limits = {tier: sample(found, "scute:adapter_limit_bytes", tier=tier) for tier in ("disk", "device")}
    assert sizes["device"] < limits["device"] < limits["disk"]
    assert labels_of(found, "vllm:lora_requests_info", "max_lora") == {"2"}


def test_model_cards_tell_the_method(server):
    cards = server.cards()
    assert {name: (card.get("method"), card.get("rank")) for name, card in cards.items()} == {
        "base": (None, None),
        "dora": ("DoRA", 16),
        "oft": ("OFT", 0),
        "stack": ("(IA)3 + LoRA", 3),
        "turned": ("OFT + (IA)3 + LoRA", 3),
    }
    assert cards["dora"]["parent"] == "base"


@pytest.mark.parametrize("name", LOADED)
def test_every_method_can_be_loaded(world, server, name: str):
    answer = server.load(name, world.folders[name])
    assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    assert name in server.models()
    check(world, server, [name, "base"])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_folder_is_refused(world, server, tmp_path, damage: str):
    folder = write_damaged(Path(world.folders["lora-r8"]), damage, tmp_path / damage)
    refuses(server, folder, DAMAGES[damage][1])
    check(world, server, ["base", "dora"])


def test_an_adapter_beyond_the_limits_is_refused(world, server, tmp_path):
    wide_rank = write_adapter(world.oracle.base, "lora-r8", tmp_path / "rank", r=513)
    wide_block = write_adapter(world.oracle.base, "oft", tmp_path / "block", oft_block_size=64)
    message = refuses(server, wide_rank, Code.CAPACITY_RANK)
    assert "LoRA rank 513 is greater than max_lora_rank 512; " in message
    refuses(server, wide_block, Code.CAPACITY_ROTATION)


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb", "\0"])
def test_what_is_no_text_is_refused(world, server, text: str):
    """JSON can say it. Where the name is only looked for, nobody has it."""
    for name, path in [(text, world.folders["dora"]), ("bad", text), ("bad", stack_path([text, "/a"]))]:
        answer = server.load(name, path)
        assert (answer.status_code, Code.SOURCE_NAME in answer.text) == (400, True), answer.text
    assert server.post("/v1/completions", model=text, prompt=[5, 6], max_tokens=1).status_code in (400, 404)
    assert server.unload(text).status_code in (400, 404)


@pytest.mark.parametrize("name", ["\u00e9", "e\u0301", "\U0001f999", "line\nbreak", "\u202e", " ", "\ufeff", '"}{'])
def test_any_text_may_be_a_name(world, server, name: str):
    assert server.load(name, world.folders["dora"]).status_code == 200
    assert name in server.models()
    assert name in labels_of(server.metrics(), "scute:adapter_info", "adapter_name")
    assert server.post("/v1/completions", model=name, prompt=[5, 6], max_tokens=1).json()["model"] == name
    assert server.unload(name).status_code == 200


@pytest.mark.parametrize("path", ["/nowhere/at/all", "nowhere/near"])
def test_a_missing_folder_is_not_found(server, path: str):
    """As in vLLM, whose message says less."""
    assert "adapter_config.json" in refuses(server, path, Code.FOLDER_MISSING)


def refuses(server: Server, folder: Path | str, code: Code) -> str:
    """The message of a refused load; the name is free again afterwards."""
    answer = server.load("bad", folder)
    error = answer.json()["error"]
    status, kind = (404, "NotFoundError") if code is Code.FOLDER_MISSING else (400, "BadRequestError")
    assert (answer.status_code, error["code"], error["type"]) == (status, status, kind)
    assert error["message"].startswith(f"[scute:{code}] ")
    assert error["message"].count("[scute:") == 1
    assert "stack trace" not in error["message"]
    assert "bad" not in server.models()
    message: str = error["message"]
    return message


def test_a_refused_name_is_not_served(server, world):
    assert server.post("/v1/completions", model="bad", prompt=[5, 6], max_tokens=1).status_code == 404
    check(world, server, ["base"])


@pytest.mark.parametrize(
    ("model", "header", "served"),
    [("oft", None, "oft"), ("oft", "dora", "dora"), ("oft", "", "oft"), ("base", None, "base"), ("base", "oft", "oft")],
)
def test_an_invocation_of_sagemaker_is_answered_by_whom_it_names(server, model: str, header: str | None, served: str):
    prompt = tiny_prompts(1)[0]
    answer = invoke(server, model, header, prompt)
    assert answer.json()["model"] == served
    expected = server.post("/v1/completions", model=served, prompt=prompt, temperature=0, logprobs=0)
    assert answer.json()["choices"][0]["logprobs"] == expected.json()["choices"][0]["logprobs"]


@pytest.mark.parametrize(("model", "header"), [("bad", None), ("base", "bad")])
def test_an_invocation_of_nobody(server, model: str, header: str | None):
    assert invoke(server, model, header, [5, 6]).status_code == 404


def invoke(server: Server, model: str, header: str | None, prompt: list[int]) -> requests.Response:
    headers = {} if header is None else {"X-Amzn-SageMaker-Adapter-Identifier": header}
    body = {"model": model, "prompt": prompt, "temperature": 0, "logprobs": 0}
    return requests.post(f"{server.address}/invocations", json=body, headers=headers, timeout=60)


def test_every_adapter_is_still_served(world, server):
    assert server.models() == ["base", *STATIC, "stack", "turned", *LOADED]
    check(world, server, ["base", *STATIC, *LOADED])


def test_metrics_of_more_adapters_than_slots(server):
    found = server.metrics()
    names = {*STATIC, "stack", "turned", *LOADED}
    assert labels_of(found, "vllm:lora_adapter_loaded", "adapter_name") == names
    on_gpu = [labels for name, labels in found if name == "vllm:lora_adapter_loaded" and ("level", "gpu") in labels]
    assert len(on_gpu) == sample(found, "vllm:num_gpu_loaded_lora_adapters") == 2
    taken = {n: sample(found, "scute:adapter_bytes", adapter_name=n, tier="device") for n in names}
    assert sum(size > 0 for size in taken.values()) == 2
    lost = {n: sample(found, "scute:adapter_evictions_total", adapter_name=n) for n in names}
    assert all(lost[name] >= 1 for name in names if not taken[name])
    assert sample(found, "scute:adapter_refusals_total", code=Code.CAPACITY_RANK) == 1
    assert sample(found, "scute:adapter_refusals_total", code=Code.FOLDER_MISSING) == 2
    cards = server.cards()
    assert {cards[n]["method"] for n in (*STATIC, *LOADED)} == {"LoRA", "DoRA", "(IA)3", "VeRA", "OFT"}
    assert (cards["lora-r8"]["rank"], cards["vera"]["rank"]) == (8, 256)


def test_every_metric_of_the_dashboard_is_there(server):
    text = (Path(__file__).parents[2] / "dashboards" / "scute.json").read_text()
    named = set(re.findall(r"\b(?:vllm|scute):\w+", text))
    assert len(named) > 10
    assert named <= {name for name, _ in server.metrics()}


def test_metrics_follow_a_running_request(server):
    def running() -> float:
        return sample(server.metrics(), "scute:adapter_generation_tokens_total", adapter_name="lora-r8")

    before = running()
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(server.complete, "lora-r8", tiny_prompts(1)[0], max_tokens=200)
        seen = set()
        while not answer.done():
            seen.add(running() - before)
        answer.result()
    assert running() - before == 200
    assert any(0 < count < 200 for count in seen), "tokens of a request are counted while it runs"
    info = labels_of(server.metrics(), "vllm:lora_requests_info", "running_lora_adapters")
    assert "lora-r8" in info


def test_metrics_forget_what_is_unloaded(world, server):
    assert server.unload("ia3").status_code == 200
    end = time.monotonic() + 30
    while "ia3" in labels_of(server.metrics(), "vllm:lora_adapter_loaded", "adapter_name"):
        assert time.monotonic() < end
        time.sleep(0.1)
    found = server.metrics()
    assert not {name for name, labels in found if ("adapter_name", "ia3") in labels}
    assert server.load("ia3", world.folders["ia3"]).status_code == 200
    assert sample(server.metrics(), "scute:adapter_generation_tokens_total", adapter_name="ia3") == 0


def test_unload_and_load_again(world, server):
    assert server.unload("ia3").status_code == 200
    assert "ia3" not in server.models()
    assert server.post("/v1/completions", model="ia3", prompt=[5, 6], max_tokens=1).status_code == 404
    assert server.load("ia3", world.folders["ia3"]).status_code == 200
    check(world, server, ["ia3", "base"])


def test_another_method_in_place(world, server, tmp_path):
    """The folder may go afterwards: an answer never waits for the disk."""
    folder = shutil.copytree(world.folders["rslora-r16"], tmp_path / "rslora-r16")
    assert server.load("rslora-r16", world.folders["lora-r3"]).status_code == 200
    assert server.load("rslora-r16", folder).status_code == 400
    assert server.load("rslora-r16", folder, load_inplace=True).status_code == 200
    shutil.rmtree(folder)
    check(world, server, ["rslora-r16", "base"])


def test_requests_that_run_keep_the_adapter_that_is_replaced(world, server, tmp_path):
    """One that begins after the load has the new weights, from the first token of the same prompt."""
    folder = Path(shutil.copytree(world.folders["dora-odd"], tmp_path / "latest"))
    prompt = tiny_prompts(1)[0]
    assert server.load("latest", folder).status_code == 200
    with ThreadPoolExecutor() as threads:
        running = threads.submit(server.complete, "latest", prompt, max_tokens=200)
        time.sleep(0.3)
        shutil.rmtree(folder)
        shutil.copytree(world.folders["lora-r3"], folder)
        assert server.load("latest", folder, load_inplace=True).status_code == 200
        assert not running.done()
        assert disagreement(world, "lora-r3", [server.complete("latest", prompt)]) <= BOUND
        assert disagreement(world, "dora-odd", [running.result()]) <= BOUND
    assert server.unload("latest").status_code == 200


def test_a_bad_folder_in_place_leaves_the_old_adapter(world, server, tmp_path):
    folder = write_damaged(Path(world.folders["lora-r8"]), "nan", tmp_path / "nan")
    assert server.load("lora-r8", folder, load_inplace=True).status_code == 400
    check(world, server, ["lora-r8", "base"])


def test_a_compiled_folder_is_loaded_like_any_other(world, server, tmp_path):
    compile_folder(Path(world.folders["dora"]), tmp_path / "out", read_base(world.base))
    assert server.load("compiled", tmp_path / "out").status_code == 200
    prompt = tiny_prompts(1)[0]
    assert server.complete("compiled", prompt) == server.complete("dora", prompt)
    assert server.unload("compiled").status_code == 200
    os.truncate(tmp_path / "out" / "members.safetensors", 1000)
    answer = server.load("spoilt", tmp_path / "out")
    assert (answer.status_code, Code.FOLDER_UNREADABLE in answer.text) == (400, True)


def check_stack(world: World, server: Server, name: str, folders: list[Path]) -> None:
    """Hold completions of a stack against PEFT's layers, one around the other."""
    rows = [server.complete(name, prompt) for prompt in tiny_prompts(2)]
    assert stack_disagreement(world, folders, rows) <= BOUND


def test_a_stack_of_the_command_line(world, server):
    check_stack(world, server, "stack", [Path(world.folders[name]) for name in STACK])
    check_stack(world, server, "turned", [Path(world.folders[name]) for name in ("oft", *STACK)])


def test_a_stack_is_loaded_and_replaced_when_one_of_its_folders_has_changed(world, server, tmp_path):
    first = shutil.copytree(world.folders["lora-r3"], tmp_path / "first, + and more")
    folders = [first, Path(world.folders["dora-odd"])]
    assert server.load("both", stack_path(folders)).status_code == 200
    check_stack(world, server, "both", folders)
    shutil.copytree(world.folders["lora-r8"], first, dirs_exist_ok=True)
    assert server.load("both", stack_path(folders), load_inplace=True).status_code == 200
    check_stack(world, server, "both", folders)
    check(world, server, ["dora", "base"])
    assert server.unload("both").status_code == 200


def test_a_stack_is_refused_with_the_reason(world, server, tmp_path):
    def stack(*names: str) -> str:
        return stack_path([world.folders.get(name, tmp_path / name) for name in names])

    assert "no stack" in refuses(server, f"scute+stack:{world.folders['dora']}", Code.STACK_PATH)
    assert "'oft' cannot be applied after 'vera' on" in refuses(server, stack("vera", "oft"), Code.STACK_ROTATION)
    assert "adapter 2 of the stack, 'gone'" in refuses(server, stack("ia3", "gone"), Code.FOLDER_MISSING)
    write_adapter(world.oracle.base, "lora-r8", tmp_path / "long", r=500)
    assert "add up" in refuses(server, stack("dora", "long"), Code.CAPACITY_RANK)


def test_unloading_waits_for_running_requests(world, server):
    """Then it gives back all that the adapter held: the only place for a shared pair here."""
    other = world.folders["vera-regenerated"]
    with ThreadPoolExecutor() as threads:
        running = threads.submit(server.complete, "vera", tiny_prompts(1)[0], max_tokens=200)
        time.sleep(0.2)
        assert server.load("vera-regenerated", other).status_code == 400
        assert server.unload("vera").status_code == 200
        assert not running.done()
        assert disagreement(world, "vera", [running.result()]) <= BOUND
    end = time.monotonic() + 30
    while (status := server.load("vera-regenerated", other).status_code) == 400 and time.monotonic() < end:
        time.sleep(0.2)
    assert status == 200
    check(world, server, ["vera-regenerated", "dora", "base"])


def test_loading_takes_nothing_from_a_listed_adapter(world, server):
    check(world, server, ["vera-regenerated", *STATIC])
    assert server.load("vera", world.folders["vera"]).status_code == 400
    check(world, server, ["vera-regenerated"])
