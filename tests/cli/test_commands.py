"""The subcommands: what they print, in both forms, and their exit codes."""

import json
import shutil
import subprocess
import sys

import pytest
from command import scute
from safetensors.torch import load_file

from scute import __version__
from scute.cli.catalogue import CATALOGUE, GROUPS
from scute.engine import upstream
from scute.errors import Code
from scute.testing.adapters import AMPLIFIED

NAMES = ("lora-r3", "dora", "ia3", "vera", "oft")


INPUTS = "(IA)3 on inputs that no gated projection produces"


@pytest.fixture
def inspected(base, folders):
    def run(name: str):
        result = scute("inspect", folders[name], "--base", base, "--json")
        assert result.exit_code == 0, result.output
        (found,) = json.loads(result.output)
        return found

    return run


@pytest.mark.parametrize(
    ("name", "live", "engine"),
    [
        ("lora-r3", [], {"--max-lora-rank": 3}),
        ("dora", ["s"], {"--max-lora-rank": 16}),
        ("ia3", ["s"], {}),
        ("vera", ["d", "e"], {"shared_rank": 256}),
        ("oft", ["R"], {"rotation_width": 32}),
    ],
)
def test_inspect_tells_the_slots_and_the_sizes(inspected, name, live, engine):
    found = inspected(name)
    assert found["served"]
    assert found["method"] == AMPLIFIED[name].method
    assert found["live_slots"] == live
    assert found["engine"] == engine


def test_inspect_counts_the_bytes_of_the_file(inspected, folders):
    for name in ("lora-r3", "dora", "vera"):
        found, tensors = inspected(name), load_file(folders[name] / "adapter_model.safetensors").values()
        in_file = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert found["owned_bytes"] + found["shared_bytes"] == in_file
        assert (found["shared_bytes"] > 0) is (name == "vera")


def test_inspect_tells_every_fold_of_dora(inspected):
    assert [(use["slot"], use["into"]) for use in inspected("dora")["slots"]] == [("s", None), ("c", "A"), ("e", "B")]


def test_inspect_prints_the_same_as_text(base, folders):
    result = scute("inspect", folders["dora"], "--base", base)
    assert result.exit_code == 0
    for part in ("DoRA", "--max-lora-rank >= 16", "only the base weight is next to it"):
        assert part in result.output


def test_inspect_of_a_refused_folder_exits_with_1(base, folders, tmp_path):
    folder = shutil.copytree(folders["lora-r3"], tmp_path / "spoilt")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "LOHA"}))
    text, as_json = scute("inspect", folder, "--base", base), scute("inspect", folder, "--base", base, "--json")
    assert text.exit_code == as_json.exit_code == 1
    assert text.output.startswith("refused: method.unsupported\n")
    (found,) = json.loads(as_json.output)
    assert found.items() >= {"served": False, "code": "method.unsupported"}.items()
    assert "LOHA" in found["sentence"]


def test_wrong_usage_exits_with_2(folders, tmp_path):
    assert scute("inspect", folders["lora-r3"], "--deep").exit_code == 2
    assert scute("inspect", folders["lora-r3"], "--base", tmp_path / "nowhere").exit_code == 2
    assert scute("inspect", folders["lora-r3"], "--base", tmp_path).exit_code == 2
    assert scute("nonsense").exit_code == 2


def test_methods_lists_table_1_and_every_format():
    listed = json.loads(scute("methods", "--json").output)
    rows = {row["method"]: row for row in listed["methods"]}
    assert {name: row["peft_type"] for name, row in rows.items()} == {
        "LoRA": "LORA",
        "rsLoRA": "LORA",
        "AdaLoRA": "ADALORA",
        "DoRA": "LORA",
        "(IA)3": "IA3",
        INPUTS: "IA3",
        "SSF": None,
        "VeRA": "VERA",
        "OFT": "OFT",
    }
    assert rows["DoRA"]["live"] == ["s"]
    assert (rows["(IA)3"]["live"], rows[INPUTS]["live"]) == (["s"], ["R"])
    assert rows["rsLoRA"] == rows["LoRA"] | {"method": "rsLoRA"}
    assert rows["VeRA"]["shared"] == ["base_model.vera_A", "base_model.vera_B"]
    assert all(name in scute("methods").output for name in rows.keys() - {INPUTS})


def test_refusals_has_an_entry_for_every_code():
    assert list(CATALOGUE) == list(Code)
    assert {code.partition(".")[0] for code in CATALOGUE} == set(GROUPS)
    listed = json.loads(scute("refusals", "--json").output)
    assert [row["code"] for row in listed] == [str(code) for code in Code]
    assert all(row["meaning"] and row["remedy"] for row in listed)
    assert all(code in scute("refusals").output for code in Code)


def test_check_accepts_the_installed_vllm():
    result = scute("check")
    assert result.exit_code == 0, result.output
    assert upstream.vllm_version() in result.output


@pytest.mark.parametrize(
    ("name", "value", "culprit"),
    [
        ("SUPPORTED", ("0.1",), "0.1"),
        ("SIGNATURES", {"vllm.lora.utils:from_layer": ("layer",)}, "vllm.lora.utils:from_layer"),
        ("SIGNATURES", {"vllm.lora.utils:nothing": ()}, "vllm.lora.utils:nothing is gone"),
        ("DISTRIBUTIONS", ("no-such-vllm",), "not installed"),
    ],
)
def test_check_names_what_does_not_fit(monkeypatch, name, value, culprit):
    monkeypatch.setattr(upstream, name, value)
    result = scute("check")
    assert result.exit_code == 1
    assert culprit in result.output


def test_version():
    result = scute("--version")
    assert (result.exit_code, result.output) == (0, f"scute {__version__}\n")


def test_the_command_imports_nothing_heavy():
    heavy = "{'torch', 'vllm', 'transformers', 'peft', 'pydantic'} & set(sys.modules)"
    code = f"import sys, scute.cli.main; assert not {heavy}, {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compile_writes_a_folder_once(base, folders, tmp_path):
    out = tmp_path / "out"
    assert scute("compile", folders["dora"], out, "--base", base).exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "members.safetensors"]
    again = scute("compile", folders["ia3"], out, "--base", base)
    assert (again.exit_code, "--force" in again.output) == (2, True)
    done = scute("compile", folders["ia3"], out, "--base", base, "--force", "--json")
    assert json.loads(done.output) == {"compiled": True, "source": str(folders["ia3"]), "folder": str(out)}
    assert json.loads((out / "manifest.json").read_text())["method"] == "(IA)3"


def test_compile_of_a_refused_folder_exits_with_1(base, folders, tmp_path):
    result = scute("compile", tmp_path, tmp_path / "out", "--base", base)
    assert result.exit_code == 1
    assert result.output.startswith("refused: folder.incomplete\n")
    assert scute("compile", folders["dora"], tmp_path / "out", "--base", tmp_path).exit_code == 2
    assert not (tmp_path / "out").exists()
    told = json.loads(scute("compile", tmp_path, tmp_path / "out", "--base", base, "--json").output)
    assert (told["compiled"], told["code"]) == (False, "folder.incomplete")


def test_compile_offers_no_force_where_it_would_not_help(base, folders, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    for out in (tmp_path, folders["dora"], tmp_path / "thesis.tex"):
        for force in ((), ("--force",)):
            result = scute("compile", folders["dora"], out, "--base", base, *force)
            assert result.exit_code == 2
            assert "not replaced" in " ".join(result.output.replace("│", " ").split())
            assert "--force" not in result.output
