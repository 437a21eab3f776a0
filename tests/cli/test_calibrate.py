"""`scute calibrate` on a CPU, and its exit codes."""

import json

import pytest
import torch
from typer.testing import CliRunner

from scute.cli.base import torch_device
from scute.cli.calibrate import _measure
from scute.cli.main import app
from scute.costs import find_device


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def scute(*arguments: str):
    return CliRunner().invoke(app, ["calibrate", *arguments])


def test_a_cpu_is_measured_and_kept(cache):
    result = scute("--gpu", "cpu", "--seconds", "0", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    kept = find_device(told["name"])
    assert told["file"].startswith(str(cache))
    assert 0.1 < kept.bandwidth_gb_s == told["bandwidth_gb_s"]
    assert 0 < kept.launch_us == told["launch_us"]
    assert kept.l2_bandwidth_gb_s is None
    assert told["sources"] == kept.sources
    assert set(told["sources"]) == {"bandwidth_gb_s", "launch_us"}
    text = scute("--gpu", "cpu", "--seconds", "0").output
    assert "GB/s" in text
    assert "not measured" in text


def test_a_folder_that_cannot_be_written_exits_with_1(cache):
    (cache / "scute").write_text("a file")
    result = scute("--device", "cpu", "--seconds", "0")
    assert (result.exit_code, "XDG_CACHE_HOME" in result.stderr) == (1, True)


@pytest.mark.parametrize(("name", "index"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_the_gpu_has_an_index(name, index, monkeypatch):
    """As torch.cuda.set_device wants it, which is torch's own here but for the driver."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    device = torch_device(name)
    assert device == torch.device("cuda", index)
    with pytest.raises((RuntimeError, AssertionError)):  # there is no driver to measure with
        _measure(device, 0)
    assert chosen == [index]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_exits_with_1():
    assert scute("--device", "cuda:7").exit_code == 1


@pytest.mark.parametrize("wrong", [("--device", "tpu"), ("--gpu", "tpu"), ("--gpu", "meta"), ("--seconds", "-1")])
def test_wrong_usage_exits_with_2(wrong):
    assert scute(*wrong).exit_code == 2
