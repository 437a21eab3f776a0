"""Stacks on the command line: `scute inspect` of a path that names one, and `scute compile` of several folders."""

import json

import pytest
from command import scute

from scute.admission.stacks import stack_path

NAMES = ("lora-r8", "lora-r3", "dora", "ia3", "vera", "oft")


@pytest.fixture
def inspected(base, folders):
    def run(*names: str, exit_code: int = 0, options: tuple[str, ...] = ()):
        paths = [folders.get(name, name) for name in names]
        result = scute("inspect", stack_path(paths), "--base", base, "--json", *options)
        assert result.exit_code == exit_code, result.output
        found = json.loads(result.output)
        return found if isinstance(found, dict) else found[0]

    return run


def test_inspect_adds_ranks_up(inspected):
    found = inspected("lora-r8", "lora-r3", "ia3")
    assert (found["served"], found["method"]) == (True, "LoRA + LoRA + (IA)3")
    assert found["engine"] == {"--max-lora-rank": 11}
    assert found["live_slots"] == ["s"]


def test_inspect_knows_where_ia3_is_served(inspected):
    assert inspected("lora-r3", "ia3")["live_slots"] == ["s"]
    assert inspected("ia3", "lora-r3")["live_slots"] == ["R", "s"]


def test_a_base_model_without_biases_has_no_live_b(inspected):
    """(IA)3 scales a base bias and DoRA does not, but there is none."""
    assert inspected("ia3", "dora")["live_slots"] == ["R", "s"]


def test_inspect_tells_deviations_of_the_whole(inspected):
    found = inspected("dora", "ia3", options=("--deep",))
    names = {layer["projection"]: layer for layer in found["deviations"]}
    assert names["model.layers.0.self_attn.k_proj"]["scale_median"] > 0.1
    assert names["model.layers.0.mlp.up_proj"]["delta_norm"] > 0


def test_inspect_tells_every_reason(inspected):
    found = inspected("vera", "nowhere", "oft", exit_code=1)
    assert [reason["code"] for reason in found["reasons"]] == ["folder.missing"]
    assert found["reasons"][0]["sentence"].startswith("adapter 2 of the stack, 'nowhere'")
    found = inspected("vera", "oft", "vera", exit_code=1)
    codes = [reason["code"] for reason in found["reasons"]]
    assert codes[0] == "stack.shared"
    assert set(codes[1:]) == {"stack.rotation"}


def test_inspect_without_a_base_model(folders):
    fine = scute("inspect", stack_path([folders["ia3"], folders["dora"]]))
    assert fine.exit_code == 0
    assert "(IA)3 + DoRA" in fine.output
    wrong = scute("inspect", stack_path([folders["ia3"], "nowhere"]))
    assert wrong.exit_code == 1
    assert wrong.output.startswith("refused: folder.missing\n")


def test_inspect_of_a_path_that_is_no_stack(base):
    for options in ((), ("--base", base)):
        result = scute("inspect", "scute+stack:/a,/b", *options)
        assert result.exit_code == 1
        assert result.output.startswith("refused: stack.path\n")


def test_a_table_has_the_names_of_a_stack(base, folders):
    result = scute("inspect", folders["ia3"], stack_path([folders["ia3"], folders["lora-r3"]]), "--base", base)
    assert result.exit_code == 0
    assert "ia3 + lora-r3" in result.output


def test_compile_of_several_folders_is_a_stack(base, folders, tmp_path, inspected):
    result = scute("compile", folders["ia3"], folders["lora-r3"], tmp_path / "out", "--base", base)
    assert result.exit_code == 0, result.output
    found = json.loads(scute("inspect", tmp_path / "out", "--base", base, "--json").output.strip())
    found = found if isinstance(found, dict) else found[0]
    path = inspected("ia3", "lora-r3")
    for field in ("method", "ranks", "rotation_widths", "live_slots", "packed_bytes", "engine"):
        assert found[field] == path[field]


def test_compile_refuses_what_a_folder_cannot_hold(base, folders, tmp_path):
    result = scute("compile", folders["lora-r3"], folders["dora"], tmp_path / "out", "--base", base)
    assert result.exit_code == 1
    assert result.output.startswith("refused: stack.magnitude\n")
    assert not (tmp_path / "out").exists()
