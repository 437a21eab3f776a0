"""`scute env`: complete, readable by programs, and silent about keys."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from scute.cli.main import app
from scute.engine import environment, plugin, upstream
from scute.engine.options import Options
from scute.errors import Incompatible


def scute(*arguments: str):
    return CliRunner().invoke(app, ["env", *arguments])


@pytest.fixture
def starts(monkeypatch):
    """Say what binding ends with, without binding in the process of the tests."""

    def set_end(error: Exception | None = None) -> None:
        def register() -> None:
            if error is not None:
                raise error

        monkeypatch.setattr(plugin, "register", register)

    set_end()
    return set_end


def test_a_process_of_its_own_tells_all():
    command = [sys.executable, "-m", "scute.cli.main", "env", "--json"]
    secrets = {"VLLM_API_KEY": "do-not-tell", "HF_TOKEN": "do-not-tell"}
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", **secrets}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=180, check=True)
    found = json.loads(done.stdout)
    assert (found["fits"], found["problem"]) == (True, None)
    assert {"scute", "torch", "transformers", "peft", "python", "device"} <= found["versions"].keys()
    assert found["plugins"]["scute"].startswith("scute ")
    assert found["options"] == Options().model_dump()
    assert found["environment"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "do-not-tell" not in done.stdout
    names = {check: [s["name"] for s in found["symbols"] if s["check"] == check] for check in ("signature", "binding")}
    assert names["binding"] == list(upstream.BOUND)
    assert names["signature"] == [*upstream.SIGNATURES, *upstream.FRONT_END_SIGNATURES]
    assert {s["problem"] for s in found["symbols"]} == {None}


@pytest.mark.usefixtures("starts")
def test_text_has_the_same(monkeypatch):
    monkeypatch.setattr(environment, "is_scutes", lambda _: True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = scute("--additional-config", '{"scute": {"shared_pairs": 9}}')
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    for line in ("shared_pairs 9", "rotation_width 32", "host_memory_gib not set", "HF_HUB_OFFLINE 1"):
        assert line in lines
    assert [line for line in lines if line.endswith(": replaced")] == [f"{name}: replaced" for name in upstream.BOUND]
    assert lines[-1] == "Scute fits this vLLM."


def test_what_does_not_fit_is_named_and_the_rest_is_told(starts, monkeypatch):
    starts(Incompatible("Scute does not fit"))
    monkeypatch.setattr(environment, "is_scutes", lambda _: False)
    monkeypatch.setitem(upstream.SIGNATURES, "vllm.lora.utils:nothing", ("self",))
    monkeypatch.setitem(upstream.USES, "vllm.lora.utils:from_layer", "_no_such_name")
    found = json.loads(scute("--json").output)
    assert (found["fits"], found["problem"]) == (False, "Scute does not fit")
    problems = {s["problem"] for s in found["symbols"] if s["check"] != "binding"}
    assert problems == {
        None,
        "vllm.lora.utils:nothing is gone",
        "vllm.lora.utils:from_layer no longer uses _no_such_name",
    }
    text = scute().output
    assert "vllm.lora.utils:nothing is gone" in text
    assert text.count("NOT replaced") == len(upstream.BOUND)
    assert text.endswith("Scute would not start:\nScute does not fit\n")


@pytest.mark.parametrize(
    ("error", "variables", "problem"),
    [
        (OSError("libcuda.so.1"), {}, "vLLM cannot be imported here: OSError: libcuda.so.1"),
        (None, {"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS is set to a list without 'scute', so vLLM runs alone."),
        (None, {"VLLM_PLUGINS": "other,scute"}, None),
    ],
)
def test_why_it_would_not_start(starts, error, variables, problem):
    starts(error)
    assert environment.fit(variables).problem == problem


@pytest.mark.usefixtures("starts")
def test_without_vllm(monkeypatch):
    monkeypatch.setattr(upstream, "DISTRIBUTIONS", ("no-such-vllm",))
    found = json.loads(scute("--json").output)
    assert (found["fits"], found["symbols"]) == (False, [])
    assert "not installed" in found["problem"]


@pytest.mark.parametrize(
    ("given", "told"),
    [("{", "no JSON"), ('{"scute": {"shared": 1}}', "shared_pairs"), ('{"scute": 1}', "The options are")],
)
def test_options_that_would_stop_the_start_are_wrong_usage(given, told):
    result = scute("--additional-config", given)
    assert result.exit_code == 2
    assert told in " ".join(result.output.replace("│", " ").split())
