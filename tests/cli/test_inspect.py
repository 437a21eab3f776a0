"""`scute inspect`: every reason at once, warnings, deviations, many folders, and what is known without a base model."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from command import scute
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from scute.admission.reasons import MOST
from scute.testing.adapters import Recipe, write_adapter
from scute.testing.oracle import load_base

NAMES = ("lora-r3", "dora", "ia3", "vera", "vera-regenerated", "oft")
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def copy_of(pool, tmp_path):
    return lambda name: shutil.copytree(pool / name, tmp_path / name)


def rewrite(folder, fields=None, change=lambda tensors: tensors):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | (fields or {})))
    save_file(change(load_file(folder / TENSORS)), folder / TENSORS)


def looked_at(*arguments: object, exit_code: int = 0):
    result = scute("inspect", *arguments, "--json")
    assert result.exit_code == exit_code, result.output
    told = json.loads(result.output)
    return told[0] if len(told) == 1 else told


def test_every_reason_is_told(copy_of, base):
    folder, a = copy_of("lora-r3"), f"base_model.model.{Q}.lora_A.weight"
    spoil = {"use_qalora": True, "new_thing": 1}
    rewrite(folder, spoil, lambda t: t | {a: torch.ones(3, 7), "x": torch.ones(1), f"base_model.model.{Q}.y": t[a]})
    codes = [
        "config.unsupported_field",
        "config.unknown_field",
        "tensor.prefix",
        "tensor.shape",
        "tensor.left_over",
    ]
    found = looked_at(folder, "--base", base, exit_code=1)
    assert sorted(reason["code"] for reason in found["reasons"]) == sorted(codes)
    assert (found["served"], found["code"]) == (False, found["reasons"][0]["code"])
    text = scute("inspect", folder, "--base", base)
    assert text.exit_code == 1
    assert [line.split()[1] for line in text.output.splitlines() if line.startswith(("refused: ", "also: "))] == [
        reason["code"] for reason in found["reasons"]
    ]


def test_without_a_base_model(pool, copy_of):
    found = looked_at(pool / "dora")
    assert (found["served"], found["method"], found["config"]["rank"]) == (None, "DoRA", 16)
    assert "q_proj" in found["config"]["targets"]
    assert "--base" in scute("inspect", pool / "dora").output
    folder = copy_of("dora")
    rewrite(folder, {"use_qalora": True}, lambda t: {f"module.{name}": tensor for name, tensor in t.items()})
    told = {reason["code"] for reason in looked_at(folder, exit_code=1)["reasons"]}
    assert told == {"config.unsupported_field", "tensor.prefix"}


def test_a_compiled_folder(pool, base, tmp_path):
    scute("compile", pool / "dora", tmp_path / "out", "--base", base)
    assert looked_at(tmp_path / "out")["method"] == "DoRA"
    found, source = looked_at(tmp_path / "out", "--base", base), looked_at(pool / "dora", "--base", base)
    for field in ("ranks", "slots", "owned_bytes", "packed_bytes", "engine"):
        assert found[field] == source[field]
    (tmp_path / "out" / "members.safetensors").unlink()
    assert looked_at(tmp_path / "out", exit_code=1)["code"] == "folder.incomplete"


def test_a_folder_of_folders(pool, base, tmp_path):
    found = looked_at(pool, "--base", base)
    assert [each["adapter"].rpartition("/")[2] for each in found] == sorted(NAMES)
    assert all(each["served"] for each in found)
    table = scute("inspect", pool, "--base", base)
    assert table.exit_code == 0
    assert table.output.count("served") == len(NAMES)
    bad = shutil.copytree(pool / "lora-r3", tmp_path / "bad")
    (bad / TENSORS).unlink()
    two = scute("inspect", pool / "dora", bad, "--base", base)
    assert two.exit_code == 1
    assert "folder.incomplete" in two.output


def test_json_is_an_array_however_many_there_are(pool):
    for folders, count in (([pool / "dora"], 1), ([pool / "dora", pool / "oft"], 2), ([pool], len(NAMES))):
        assert len(json.loads(scute("inspect", *folders, "--json").output)) == count


def test_a_table_counts_what_it_does_not_show(pool, base, copy_of):
    folder = copy_of("lora-r3")
    rewrite(folder, {"base_model_name_or_path": "someone/other"})
    told = scute("inspect", folder, pool / "oft", "--base", base, "--deep").output
    row = next(line for line in told.splitlines() if "lora-r3" in line)
    assert row.split("│")[7:9] == [f" {'1':8} ", f" {'served':7} "]
    for part in ("|s - 1|", "|R - I|", "delta W", "2 adapters", "--json"):
        assert part in told
    rewrite(folder, {"use_qalora": True, "new_thing": 1})
    table = scute("inspect", folder, pool / "oft", "--base", base).output
    assert "and 1 more" in " ".join(table.split())
    assert "|s - 1|" not in table


def test_reasons_that_are_left_out_are_counted(copy_of, base):
    folder = copy_of("lora-r3")
    rewrite(folder, change=lambda t: t | {f"x.{i}": torch.ones(1) for i in range(MOST + 5)})
    found = looked_at(folder, "--base", base, exit_code=1)
    assert (len(found["reasons"]), found["reasons_left_out"]) == (MOST, 5)
    assert "and 5 more reasons" in scute("inspect", folder, "--base", base).output
    assert f"and {MOST + 4} more" in " ".join(scute("inspect", folder, folder, "--base", base).output.split())


def test_folders_beside_adapters_are_no_adapters(pool, base, tmp_path):
    shutil.copytree(pool / "oft", tmp_path / "all" / "oft")
    (tmp_path / "all" / "logs").mkdir()
    (tmp_path / "all" / "notes.txt").write_text("")
    assert looked_at(tmp_path / "all", "--base", base)["adapter"].endswith("oft")
    assert looked_at(tmp_path / "all" / "logs", "--base", base, exit_code=1)["code"] == "folder.incomplete"
    assert looked_at(tmp_path / "nowhere", exit_code=1)["code"] == "folder.missing"


def test_another_base_model_is_a_warning(copy_of, base):
    folder = copy_of("lora-r3")
    rewrite(folder, {"base_model_name_or_path": "someone/other-7b"})
    (warning,) = looked_at(folder, "--base", base)["warnings"]
    assert "'other-7b'" in warning
    rewrite(folder, {"base_model_name_or_path": f"someone/{base.name}"})
    assert looked_at(folder, "--base", base)["warnings"] == []


def test_an_output_head_is_served_by_no_engine(base, tmp_path):
    recipe = Recipe("LoRA", LoraConfig, 1, ("q_proj", "lm_head"), {"r": 4})
    write_adapter(load_base(base), recipe, tmp_path / "head")
    (reason,) = looked_at(tmp_path / "head", "--base", base, exit_code=1)["reasons"]
    assert reason["code"] == "module.unsupported"
    assert "lm_head" in reason["sentence"]
    predicted = scute("predict", "--base", base, "--pool", tmp_path / "head", "--gpu", "h200", "--batch", 4)
    assert (predicted.exit_code, "module.unsupported" in predicted.output) == (1, True)


def test_a_rank_that_no_engine_serves_is_refused(base, tmp_path):
    """Though a conversion takes it."""
    folder = write_adapter(base, "lora-r3", tmp_path / "long", r=513)
    (found,) = json.loads(scute("inspect", folder, "--base", base, "--json").output)
    (reason,) = found["reasons"]
    assert (found["served"], reason["code"]) == (False, "capacity.rank")
    assert "512" in reason["sentence"]


def test_dead_tensors_and_nan_are_found_in_the_values(copy_of, base):
    folder, b = copy_of("lora-r3"), f"base_model.model.{Q}.lora_B.weight"
    rewrite(folder, change=lambda t: t | {b: torch.zeros_like(t[b])})
    assert looked_at(folder, "--base", base)["warnings"] == []
    found = looked_at(folder, "--base", base, "--deep")
    assert found["warnings"] == [f"{b} is all zero"]
    assert found["deviations"][0]["delta_norm"] == 0
    rewrite(folder, change=lambda t: {name: torch.full_like(tensor, torch.nan) for name, tensor in t.items()})
    assert looked_at(folder, "--base", base)["served"]
    found = looked_at(folder, "--base", base, "--deep", exit_code=1)
    assert {reason["code"] for reason in found["reasons"]} == {"tensor.not_finite"}
    assert len(found["reasons"]) == len(load_file(folder / TENSORS))


def test_deviations(pool, base):
    """Against the same numbers from whole matrices."""
    deep = {name: looked_at(pool / name, "--base", base, "--deep")["deviations"][0] for name in NAMES}
    tensors = load_file(pool / "dora" / TENSORS)
    prefix = f"base_model.model.{Q}"
    a, b = (tensors[f"{prefix}.lora_{which}.weight"].double().T for which in "AB")
    weight = load_file(base / "model.safetensors")[f"{Q}.weight"].double().T
    scale = tensors[f"{prefix}.lora_magnitude_vector"] / torch.linalg.vector_norm(weight + 2 * a @ b, dim=0)
    assert deep["dora"]["delta_norm"] == pytest.approx(float((2 * a @ b).norm()))
    assert deep["dora"]["scale_max"] == pytest.approx(float((scale - 1).abs().max()), rel=1e-6)
    assert deep["dora"]["scale_median"] == pytest.approx(float((scale - 1).abs().median()), rel=1e-6)
    assert 0 < deep["oft"]["rotation_max"] <= deep["oft"]["rotation_norm"]
    assert deep["ia3"]["scale_max"] > deep["ia3"]["scale_median"] > 0
    assert deep["vera"]["delta_norm"] > 0
    text = scute("inspect", pool / "oft", "--base", base, "--deep").output
    assert "largest" in text


def test_it_imports_no_vllm(pool, base):
    code = (
        "import sys; from typer.testing import CliRunner; from scute.cli.main import app;"
        f"assert CliRunner().invoke(app, ['inspect', {str(pool / 'dora')!r}, '--base', {str(base)!r}]).exit_code == 0;"
        "assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


HOSTILE = ["\ud800", "\x1b[31mred", "two\nlines", "x" * 10**5, ["\ud800", 3, {}], {"a": 1}, 10**300, True, None]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("field", ["peft_type", "peft_version", "base_model_name_or_path", "target_modules", "r"])
def test_fields_that_are_shown_stay_printable(field, value, copy_of, base):
    folder = copy_of("lora-r3")
    rewrite(folder, {field: value})
    for arguments in ([folder], [folder, "--base", base], [folder, folder, "--base", base]):
        result = scute("inspect", *arguments)
        assert result.exit_code in (0, 1), result.exception
        assert isinstance(result.exception, SystemExit | None)
        assert all(line.isprintable() for line in result.output.splitlines())
        looked_at(*arguments, exit_code=result.exit_code)
