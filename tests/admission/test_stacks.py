"""Stacks against the PEFT library's own layers, one around the other, and the paths that name them."""

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, OFTConfig, PeftModel, VeraConfig, get_peft_model
from peft_oracle import WIDTH, outputs_of, relative, save, served, toy

from scute.admission import BaseModel, compile_adapter, compile_folder
from scute.admission.reasons import Reasons
from scute.admission.stacks import compile_stack, find_stack, folders_of, stack_path
from scute.algebra import column_norms, stack_forms
from scute.errors import Code, Refusal
from scute.testing.nested import nested

ALL = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS = {
    "lora": lambda: LoraConfig(target_modules=ALL, r=3, lora_alpha=5, lora_bias=True),
    "rslora": lambda: LoraConfig(target_modules=["q_proj", "up_proj", "down_proj"], r=5, use_rslora=True),
    "bias": lambda: LoraConfig(target_modules=["q_proj", "v_proj"], r=2, bias="all"),
    "dora": lambda: LoraConfig(target_modules=ALL, r=4, use_dora=True),
    "dora-up": lambda: LoraConfig(target_modules=["v_proj", "up_proj"], r=2, use_dora=True),
    "ia3": lambda: IA3Config(target_modules=["q_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "ia3-inputs": lambda: IA3Config(target_modules=["o_proj", "up_proj"], feedforward_modules=["o_proj"]),
    "vera": lambda: VeraConfig(target_modules=ALL, r=6),
    "oft": lambda: OFTConfig(target_modules=ALL, oft_block_size=4),
    "oft-3": lambda: OFTConfig(target_modules=["q_proj", "up_proj"], oft_block_size=3),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parts")
    for name, config in CONFIGS.items():
        save(root / name, toy(), config())
    return {name: root / name for name in CONFIGS}


def served_stack(base, forms):
    """The base model with one member a projection in place of every adapted layer."""
    resolved = []
    for form in forms:
        members = {
            name: m.resolve_magnitude(column_norms(base.get_submodule(name).weight.T, m.terms))
            for name, m in form.members.items()
        }
        resolved.append(replace(form, members=members))
    return served(base, stack_forms(resolved))


def assert_nested(names, folders, gated=True, tolerance=1e-10):
    base = toy()
    paths = [folders[name] for name in names]
    forms = compile_stack(paths, BaseModel.from_module(base, torch.float64, gated=gated))
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected, found = outputs_of(nested(base, paths), x), outputs_of(served_stack(base, forms), x)
    for name in set(found) - {n for n in found if n.endswith("up_proj") and gated and "ia3" in names}:
        assert relative(found[name], expected[name]) <= tolerance, name
    for count in range(len(names)):  # each of them matters
        fewer = outputs_of(nested(base, [p for i, p in enumerate(paths) if i != count]), x)
        assert relative(expected[""], fewer[""]) >= 0.01
    return forms


def refused(first, second):
    """The code of a pair that has no member."""
    if first == second == "bias":
        return Code.STACK_BIAS
    if first == second == "vera":
        return Code.STACK_SHARED
    if first == "vera" and second in ("oft", "oft-3", "ia3-inputs"):
        return Code.STACK_ROTATION
    return None


@pytest.mark.parametrize(("first", "second"), list(itertools.product(CONFIGS, CONFIGS)))
def test_two_equal_the_nested_layers_of_peft(first, second, folders):
    code = refused(first, second)
    if code is None:
        assert_nested([first, second], folders)
        return
    with pytest.raises(Refusal) as found:
        assert_nested([first, second], folders)
    assert found.value.code is code


THREE = [
    ("ia3", "lora", "dora"),
    ("lora", "ia3", "lora"),
    ("oft", "vera", "dora"),
    ("dora", "ia3", "oft"),
    ("lora", "oft-3", "oft"),
    ("ia3", "ia3", "rslora"),
    ("bias", "ia3", "dora"),
]


@pytest.mark.parametrize("names", THREE, ids="-".join)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
def test_three_equal_the_nested_layers_of_peft(names, gated, folders):
    assert_nested(names, folders, gated=gated)


def test_ia3_on_vera_needs_a_gated_mlp(folders):
    """Where it is gated, l is on the up projection, before the shared A; elsewhere A would have to take it up."""
    assert_nested(["vera", "ia3"], folders)
    with pytest.raises(Refusal, match=r"'ia3' cannot be applied after 'vera' on layers\.0\.mlp\.down_proj") as found:
        assert_nested(["vera", "ia3"], folders, gated=False)
    assert found.value.code is Code.STACK_ROTATION


def test_where_ia3_of_a_stack_is_served(folders):
    """On the up projection if nothing after it reads the input of the down projection, else where PEFT has it."""
    base = BaseModel.from_module(toy(), gated=True)
    up, down = "layers.0.mlp.up_proj", "layers.0.mlp.down_proj"

    def last(*names):
        return stack_forms(compile_stack([folders[name] for name in names], base)).members

    assert last("lora", "ia3")[down].rotation is None
    assert last("lora", "ia3")[up].scale is not None
    assert last("ia3", "lora")[down].rotation.width == 1
    assert last("ia3", "lora")[up].scale is None


def test_what_only_one_adapter_has_passes_as_it_is(folders):
    base = BaseModel.from_module(toy())
    alone = compile_adapter(folders["lora"], base).members
    both = stack_forms(compile_stack([folders["lora"], folders["oft-3"]], base)).members
    one, two = alone["layers.1.mlp.gate_proj"], both["layers.1.mlp.gate_proj"]
    assert torch.equal(one.terms[0].a, two.terms[0].a)
    assert one.terms[0].c == two.terms[0].c
    assert both["layers.1.mlp.up_proj"].rank == alone["layers.1.mlp.up_proj"].rank


# The reference itself, against what PEFT offers to have several adapters at work.


def both_active(folders, first, second):
    model = PeftModel.from_pretrained(toy(), folders[first], adapter_name="first")
    model.load_adapter(folders[second], "second")
    model.base_model.set_adapter(["first", "second"])
    return model.eval()


def one_around_the_other(folders, first, second):
    inner = PeftModel.from_pretrained(toy(), folders[first])
    return PeftModel.from_pretrained(inner.base_model.model, folders[second]).eval()


def second_on_the_merged_first(folders, first, second):
    merged = PeftModel.from_pretrained(toy(), folders[first]).merge_and_unload()
    return PeftModel.from_pretrained(merged, folders[second]).eval()


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        (both_active, "lora", "rslora"),
        (both_active, "lora", "dora"),
        (both_active, "dora", "rslora"),
        (both_active, "ia3", "ia3"),
        (one_around_the_other, "ia3", "lora"),
        (one_around_the_other, "lora", "ia3"),
        (one_around_the_other, "ia3", "dora"),
        (one_around_the_other, "oft", "lora"),
        (one_around_the_other, "lora", "oft"),
        (second_on_the_merged_first, "oft-3", "oft"),
        (second_on_the_merged_first, "oft", "lora"),
        (second_on_the_merged_first, "rslora", "oft"),
        (second_on_the_merged_first, "vera", "rslora"),
    ],
)
def test_the_nested_layers_are_what_peft_computes(how, first, second, folders):
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = nested(toy(), [folders[first], folders[second]])(x)
        torch.testing.assert_close(found, how(folders, first, second)(x), rtol=1e-9, atol=1e-9)


# Paths.


@pytest.mark.parametrize("names", [["/a", "/b"], ["a,b", "c+d", "e]", 'f"', "g h", "\u00e4"], ["a", "a", "a"]])
def test_a_path_names_its_folders(names):
    assert folders_of(stack_path(names)) == tuple(names)


def test_any_other_path_is_its_own_folder():
    assert folders_of('["/a", "/b"]') == ('["/a", "/b"]',)
    assert folders_of("org/adapter") == ("org/adapter",)


WRONG = [
    "",
    "/a,/b",
    "a+b",
    "{}",
    '"/a"',
    "[]",
    '["/a"]',
    '["/a", ""]',
    '["/a", 1]',
    '["/a", null]',
    '["/a", "/b"',
    '["/a", "/b"] "/c"',
    '["/a", ["/b", "/c"]]',
    json.dumps(["/a"] * 17),
    "[" * 100_000,
    json.dumps(["/a", stack_path(["/b", "/c"])]),
]


@pytest.mark.parametrize("rest", WRONG, ids=lambda rest: rest[:20])
def test_a_path_that_is_no_stack(rest):
    with pytest.raises(Refusal) as found:
        folders_of("scute+stack:" + rest)
    assert found.value.code is Code.STACK_PATH


# Refusals and inspection.


def test_a_refusal_names_the_adapter(folders, tmp_path):
    base = BaseModel.from_module(toy())
    with pytest.raises(Refusal, match=r"adapter 2 of the stack, 'nothing': the folder 'nothing' is not there") as found:
        compile_stack([folders["lora"], tmp_path / "nothing"], base)
    assert found.value.code is Code.FOLDER_MISSING


def test_all_reasons_of_all_adapters_are_collected(folders, tmp_path):
    base, reasons = BaseModel.from_module(toy()), Reasons(collect=True)
    assert find_stack([tmp_path / "one", folders["vera"], tmp_path / "two"], base, reasons, values=False) is None
    assert [reason.sentence[:24] for reason in reasons.found] == [
        "adapter 1 of the stack, ",
        "adapter 3 of the stack, ",
    ]
    reasons = Reasons(collect=True)
    assert find_stack([folders["vera"], folders["vera"]], base, reasons, values=False) is None
    assert reasons.found[0].code is Code.STACK_SHARED


def test_blocks_that_are_too_wide_together(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(12 * 13, 4))
    for width in (12, 13):
        adapted = get_peft_model(copy.deepcopy(model), OFTConfig(target_modules=["0"], oft_block_size=width))
        adapted.save_pretrained(tmp_path / str(width))
    with pytest.raises(Refusal, match="blocks of 156") as found:
        compile_stack([tmp_path / "12", tmp_path / "13"], BaseModel.from_module(model))
    assert found.value.code is Code.STACK_ROTATION


# Compiled folders.


@pytest.mark.parametrize("names", [("ia3", "lora"), ("lora", "ia3", "oft"), ("vera", "lora"), ("lora", "oft")])
def test_a_compiled_stack_is_the_stack(names, folders, tmp_path):
    base, paths = toy(), [folders[name] for name in names]
    known = BaseModel.from_module(base, torch.float64, gated=True)
    compile_folder(paths, tmp_path / "stack", known)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    expected = outputs_of(served_stack(base, compile_stack(paths, known)), x)
    found = outputs_of(served(base, compile_adapter(tmp_path / "stack", known)), x)
    assert relative(found[""], expected[""]) <= 1e-12
    sources = json.loads((tmp_path / "stack" / "manifest.json").read_text())["source"]
    assert [source["folder"] for source in sources] == list(names)


def test_compiled_folders_stack_as_their_sources_do(folders, tmp_path):
    """(IA)3 is not on the up projection in them, so that what is applied after it finds it where PEFT has it."""
    base = toy()
    known = BaseModel.from_module(base, torch.float64, gated=True)
    compiled = {name: tmp_path / name for name in ("ia3", "lora")}
    for name, out in compiled.items():
        compile_folder(folders[name], out, known)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    expected = outputs_of(nested(base, [folders["ia3"], folders["lora"]]), x)
    found = outputs_of(served_stack(base, compile_stack(list(compiled.values()), known)), x)
    assert relative(found[""], expected[""]) <= 1e-10
    compile_folder(list(compiled.values()), tmp_path / "both", known)
    found = outputs_of(served(base, compile_adapter(tmp_path / "both", known)), x)
    assert relative(found[""], expected[""]) <= 1e-10


def test_a_magnitude_beside_another_adapter_cannot_be_compiled(folders, tmp_path):
    base = BaseModel.from_module(toy())
    with pytest.raises(Refusal, match="'dora' has a magnitude on layers") as found:
        compile_folder([folders["rslora"], folders["dora"]], tmp_path / "out", base)
    assert found.value.code is Code.STACK_MAGNITUDE
    assert not (tmp_path / "out").exists()
