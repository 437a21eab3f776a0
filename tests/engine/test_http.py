"""The OpenAI server: adapters are loaded, refused with a sentence and unloaded while it serves."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import World, disagreement
from damage import DAMAGES, write_damaged

from scute.admission import compile_folder
from scute.admission.base_folder import read_base
from scute.engine.offline import Row
from scute.errors import Code
from scute.testing.adapters import write_adapter
from scute.testing.tiny import VOCABULARY, tiny_prompts

pytestmark = pytest.mark.engine

BOUND = 1e-4
STATIC = ["dora", "oft"]
LOADED = ["lora-r8", "ia3", "vera", "oft-cayley", "dora-odd"]


@dataclass(frozen=True)
class Server:
    """A server that runs, and the requests that these tests send to it."""

    address: str
    process: subprocess.Popen[bytes]

    def post(self, path: str, **body: Any) -> requests.Response:
        return requests.post(f"{self.address}{path}", json=body, timeout=60)

    def load(self, name: str, folder: Path | str, **options: Any) -> requests.Response:
        return self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(folder), **options)

    def unload(self, name: str) -> requests.Response:
        return self.post("/v1/unload_lora_adapter", lora_name=name)

    def models(self) -> list[str]:
        cards = requests.get(f"{self.address}/v1/models", timeout=60).json()["data"]
        return [card["id"] for card in cards]

    def complete(self, model: str, prompt: list[int], max_tokens: int = 8) -> Row:
        """Greedy tokens; vLLM spells tokens as "token_id:83" when asked for ids."""
        answer = self.post(
            "/v1/completions", model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True,
            echo=True, logprobs=0, return_tokens_as_token_ids=True,
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        logprobs = answer.json()["choices"][0]["logprobs"]
        tokens = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
        return Row(tokens=tokens, logprobs=logprobs["token_logprobs"][1:])


@pytest.fixture(scope="module")
def server(world, tmp_path_factory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("http")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "model": world.base, "served-model-name": "base", "tokenizer": write_tokenizer(root / "tokenizer"),
        "host": "127.0.0.1", "port": port, "dtype": "float32", "max-model-len": 256, "max-num-seqs": 8,
        "max-loras": 2, "max-cpu-loras": 2, "max-lora-rank": 16, "gpu-memory-utilization": 0.05,
        "additional-config": '{"scute": {"shared_pairs": 1}}',
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enable-lora", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    compile_folder(Path(world.folders["oft"]), root / "oft", read_base(world.base))
    modules = {name: world.folders[name] for name in STATIC} | {"oft": root / "oft"}
    command += ["--lora-modules", *(f"{name}={path}" for name, path in modules.items())]
    log = root / "server.log"
    with log.open("wb") as output:
        environment = os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for(f"http://127.0.0.1:{port}", process, log)
            yield Server(f"http://127.0.0.1:{port}", process)
        finally:
            process.terminate()
            process.wait(timeout=60)


def write_tokenizer(folder: Path) -> Path:
    """One word for every id of the tiny models."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w2").save_pretrained(folder)
    return folder


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            if requests.get(f"{address}/health", timeout=5).status_code == 200:
                return
        except requests.ConnectionError:
            time.sleep(0.5)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-8000:]}")


def check(world: World, server: Server, names: list[str]) -> None:
    """Hold completions of the models against the PEFT library; "base" is the base model."""
    prompts = tiny_prompts(2)
    for name in names:
        rows = [server.complete(name, prompt) for prompt in prompts]
        assert disagreement(world, None if name == "base" else name, rows) <= BOUND, name


def test_adapters_of_the_command_line(world, server):
    assert server.models() == ["base", *STATIC]
    check(world, server, ["base", *STATIC])


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
    wide_rank = write_adapter(world.oracle.base, "lora-r8", tmp_path / "rank", r=32)
    wide_block = write_adapter(world.oracle.base, "oft", tmp_path / "block", oft_block_size=64)
    message = refuses(server, wide_rank, Code.CAPACITY_RANK)
    assert "LoRA rank 32 is greater than max_lora_rank 16." in message
    refuses(server, wide_block, Code.CAPACITY_ROTATION)


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


def test_every_adapter_is_still_served(world, server):
    assert server.models() == ["base", *STATIC, *LOADED]
    check(world, server, server.models())


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
