"""An OpenAI server in a process of its own, and the requests that tests send to it."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from scute.engine.offline import Row
from scute.testing.tiny import VOCABULARY


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

    def cards(self) -> dict[str, dict[str, Any]]:
        cards = requests.get(f"{self.address}/v1/models", timeout=60).json()["data"]
        return {card["id"]: card for card in cards}

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Every sample by its name and labels, less model_name and engine, which are the same for all."""
        page = requests.get(f"{self.address}/metrics", timeout=60)
        assert page.status_code == 200
        samples = [s for family in text_string_to_metric_families(page.text) for s in family.samples]
        return {
            (s.name, frozenset((k, v) for k, v in s.labels.items() if k not in ("model_name", "engine"))): s.value
            for s in samples
        }

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


@contextmanager
def serve(
    base: Path, root: Path, modules: Mapping[str, Path | str], scute: Mapping[str, Any], **environment: str
) -> Iterator[Server]:
    """A server with two slots. modules: adapters of the command line by name; scute: options."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "model": base, "served-model-name": "base", "tokenizer": write_tokenizer(root / "tokenizer"),
        "host": "127.0.0.1", "port": port, "dtype": "float32", "max-model-len": 256, "max-num-seqs": 8,
        "max-loras": 2, "max-cpu-loras": 2, "max-lora-rank": 16, "gpu-memory-utilization": 0.05,
        "additional-config": json.dumps({"scute": scute}),
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enable-lora", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    if modules:
        command += ["--lora-modules", *(_module(name, path) for name, path in modules.items())]
    log = root / "server.log"
    with log.open("wb") as output:
        environment = os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "HF_HUB_OFFLINE": "1"} | environment
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for(f"http://127.0.0.1:{port}", process, log)
            yield Server(f"http://127.0.0.1:{port}", process)
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            finally:
                process.kill()


def _module(name: str, path: Path | str) -> str:
    """vLLM takes a comma for JSON."""
    return json.dumps({"name": name, "path": path}) if "," in str(path) else f"{name}={path}"


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
