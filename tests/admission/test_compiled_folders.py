"""Compiled folders: what is read is what was written, and a folder that was spoilt is refused."""

import contextlib
import dataclasses
import json
import os
import shutil

import pytest
import torch
from peft import IA3Config, LoraConfig, OFTConfig, VeraConfig
from peft_oracle import outputs_of, save, served, toy
from safetensors.torch import load_file, save_file

from scute.admission import BaseModel, compile_adapter, compile_folder, write_folder
from scute.admission.compile import find_form
from scute.admission.compiled.manifest import DIGEST, MANIFEST_FILE, WEIGHTS_FILE, content_digest
from scute.admission.compiled.writer import file_digest
from scute.admission.reasons import Reasons
from scute.algebra import Bias, Member, Owner, Rotation, SharedPair, Term, ssf
from scute.errors import Code, Refusal

Q = "layers.0.self_attn.q_proj"
CONFIGS = {
    "lora": lambda: LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_bias=True, bias="lora_only"),
    "bias_all": lambda: LoraConfig(target_modules=["q_proj"], r=4, bias="all"),
    "rslora": lambda: LoraConfig(target_modules=["q_proj"], r=3, use_rslora=True, rank_pattern={"q_proj": 5}),
    "dora": lambda: LoraConfig(target_modules=["q_proj", "v_proj"], r=4, use_dora=True),
    "ia3": lambda: IA3Config(
        target_modules=["q_proj", "o_proj", "down_proj"], feedforward_modules=["down_proj", "o_proj"]
    ),
    "vera": lambda: VeraConfig(target_modules=["q_proj", "v_proj"], r=4),
    "vera_drawn": lambda: VeraConfig(target_modules=["q_proj", "o_proj"], r=4, save_projection=False),
    "oft": lambda: OFTConfig(target_modules=["q_proj", "v_proj"], oft_block_size=4, block_share=True),
}


@pytest.fixture(scope="module")
def base():
    return BaseModel.from_module(toy(torch.float32))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, base):
    """(source folder, compiled folder) of every kind."""
    root = tmp_path_factory.mktemp("pairs")
    for kind, config in CONFIGS.items():
        save(root / kind, toy(torch.float32), config())
        compile_folder(root / kind, root / f"{kind}-compiled", base, base_name="toy")
    return {kind: (root / kind, root / f"{kind}-compiled") for kind in CONFIGS}


@pytest.fixture
def copy_of(pairs, tmp_path):
    return lambda kind: shutil.copytree(pairs[kind][1], tmp_path / kind)


def assert_same(found, expected):
    """Equal in every field, and tensors in every bit, dtype and stride, so that later sums have the same order."""
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
        assert torch.equal(found, expected)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            assert_same(left, right)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_read_is_what_was_compiled(kind, pairs, base):
    source, out = pairs[kind]
    assert_same(compile_adapter(out, base), compile_adapter(source, base))
    assert sorted(path.name for path in out.iterdir()) == [MANIFEST_FILE, WEIGHTS_FILE]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_drawn_pair_follows_the_dtype_that_is_served(dtype, pairs, base):
    """It is not in the folder, and the source would draw another one too."""
    other = dataclasses.replace(base, dtype=dtype)
    source, out = pairs["vera_drawn"]
    assert_same(compile_adapter(out, other), compile_adapter(source, other))
    assert not any(name.startswith("pair") for name in load_file(out / WEIGHTS_FILE))


def test_a_magnitude_stays_unresolved(pairs, base):
    names = load_file(pairs["dora"][1] / WEIGHTS_FILE)
    assert f"{Q}.magnitude" in names
    assert f"{Q}.s" not in names
    assert compile_adapter(pairs["dora"][1], base).members[Q].magnitude is not None


def test_the_manifest_says_where_it_came_from(pairs, base):
    source, out = pairs["dora"]
    manifest = json.loads((out / MANIFEST_FILE).read_text())
    files = ("adapter_config.json", "adapter_model.safetensors")
    config = json.loads((source / files[0]).read_text())
    assert manifest["source"] == {
        "folder": "dora",
        "peft_version": config["peft_version"],
        "sha256": {name: file_digest(source / name) for name in files},
    }
    assert manifest["base"] == {"folder": "toy", "dtype": "float32", "projections": base.fingerprint}
    assert (manifest["method"], manifest["format"]) == ("DoRA", 1)


def everything() -> Member:
    """A member of all slots, each far from the identity."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    terms = (Term(draw(24, 3), draw(3, 36), 0.1, draw(3), draw(36)), Term(draw(24, 2).bfloat16(), draw(2, 36)))
    bias = Bias(scaled=True, shift=draw(36), factor=draw(36))
    return Member(Rotation(draw(6, 4, 4)), draw(36), bias, terms)


def test_members_that_no_peft_folder_describes(tmp_path, base):
    members = {Q: everything(), "layers.1.mlp.up_proj": ssf(torch.full((60,), 2.0), torch.ones(60))}
    write_folder(tmp_path / "out", members, base, method="hypernetwork")
    form = compile_adapter(tmp_path / "out", base)
    assert form.method == "hypernetwork"
    layout = {name: dataclasses.replace(m, terms=tuple(map(in_files_layout, m.terms))) for name, m in members.items()}
    assert_same(form.members, layout)


def in_files_layout(term: Term) -> Term:
    return dataclasses.replace(term, a=term.a.T.contiguous().T, b=term.b.T.contiguous().T)


def test_ssf_against_plain_torch(tmp_path, base):
    model = toy(torch.float32)
    scale, shift = torch.linspace(0.5, 2, 36), torch.linspace(-1, 1, 36)
    write_folder(tmp_path / "ssf", {Q: ssf(scale, shift)}, base, method="SSF")
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(4))
    found, plain = (outputs_of(m, x)[Q] for m in (served(model, compile_adapter(tmp_path / "ssf", base)), model))
    torch.testing.assert_close(found, plain * scale + shift)


def test_tensors_that_share_memory(tmp_path, base):
    """A generator may hand the same tensor to every layer."""
    member = ssf(vector := torch.linspace(1, 2, 60), vector)
    write_folder(tmp_path / "out", {f"layers.{i}.mlp.up_proj": member for i in (0, 1)}, base, method="SSF")
    assert len(load_file(tmp_path / "out" / WEIGHTS_FILE)) == 4


PAIR = SharedPair("x", torch.ones(24, 2), torch.ones(2, 36))
OTHER = SharedPair("y", torch.ones(24, 2), torch.zeros(2, 36))


SAME_KEY = SharedPair("x", torch.ones(24, 2), torch.zeros(2, 36))


def on(pair: SharedPair, **fields) -> Member:
    term = Term(pair.a, pair.b, 1.0, torch.ones(2), None, Owner.SHARED, Owner.SHARED, pair)
    return Member(terms=(dataclasses.replace(term, **fields),))


@pytest.mark.parametrize(
    ("members", "error", "match"),
    [
        ({Q: on(PAIR), "layers.1.self_attn.q_proj": on(OTHER)}, ValueError, "at most one shared pair"),
        ({Q: on(PAIR), "layers.1.self_attn.q_proj": on(SAME_KEY)}, ValueError, "at most one shared pair"),
        ({Q: on(PAIR, a=torch.zeros(24, 2))}, ValueError, "leading part"),
        ({Q: Member(terms=(Term(PAIR.a, PAIR.b, a_owner=Owner.SHARED),))}, ValueError, "both of a shared pair"),
        ({Q: Member(terms=on(PAIR).terms * 2)}, ValueError, "at most one term on the pair"),
        ({Q: Member(terms=(Term(PAIR.a, PAIR.b, float("nan")),))}, ValueError, "not finite"),
        ({Q: ssf(torch.ones(35), torch.ones(36))}, Refusal, "tensor.shape"),
        ({Q: ssf(torch.full((36,), torch.nan), torch.ones(36))}, Refusal, "tensor.not_finite"),
        ({"layers.7.self_attn.q_proj": ssf(torch.ones(36), torch.ones(36))}, Refusal, "tensor.no_module"),
        ({Q: Member(Rotation(torch.ones(5, 5, 5)))}, Refusal, "tensor.shape"),
        ({Q: on(SharedPair("z", torch.ones(20, 2), torch.ones(2, 36)))}, Refusal, "widest"),
    ],
)
def test_what_an_engine_would_refuse_is_not_written(members, error, match, tmp_path, base):
    with pytest.raises(error, match=match):
        write_folder(tmp_path / "out", members, base, method="x")
    assert list(tmp_path.iterdir()) == []


def test_an_output_head_is_not_written(tmp_path, base):
    """The engine of tests/engine/test_admission_limits.py refuses it."""
    save(tmp_path / "head", toy(torch.float32), LoraConfig(target_modules=["q_proj", "lm_head"], r=2))
    for head, refused in ((None, False), ("lm_head", True)):
        with pytest.raises(Refusal, match=r"module.unsupported.*lm_head") if refused else contextlib.nullcontext():
            compile_folder(tmp_path / "head", tmp_path / f"out-{head}", dataclasses.replace(base, output_head=head))
        assert (tmp_path / f"out-{head}").exists() is not refused


def test_a_folder_that_is_there_is_kept(pairs, tmp_path, base):
    source, out = pairs["lora"][0], tmp_path / "out"
    compile_folder(pairs["ia3"][0], out, base)
    with pytest.raises(FileExistsError, match="--force"):
        compile_folder(source, out, base)
    assert compile_adapter(out, base).method == "(IA)3"
    compile_folder(source, out, base, force=True)
    assert compile_adapter(out, base).method == "LoRA"
    assert list(tmp_path.iterdir()) == [out]


def test_force_replaces_nothing_but_compiled_folders(pairs, tmp_path, base):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("")
    (tmp_path / "thesis" / "manifest.json").write_text("{}")
    (tmp_path / "link").symlink_to(pairs["lora"][1])
    for there in (tmp_path / "thesis", pairs["lora"][0], tmp_path / "link"):
        with pytest.raises(FileExistsError, match="not replaced"):
            compile_folder(pairs["lora"][0], there, base, force=True)
        assert list(there.iterdir())


def test_a_write_that_fails_leaves_nothing(pairs, tmp_path, base, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.rename", fail)
    with pytest.raises(OSError, match="disk full"):
        compile_folder(pairs["lora"][0], tmp_path / "out", base)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_source_and_a_compiled_source(pairs, tmp_path, base):
    with pytest.raises(Refusal):
        compile_folder(tmp_path / "nowhere", tmp_path / "out", base)
    with pytest.raises(ValueError, match="compiled folder already"):
        compile_folder(pairs["lora"][1], tmp_path / "out", base)


def test_a_foreign_manifest_beside_a_peft_adapter(pairs, tmp_path, base):
    folder = shutil.copytree(pairs["lora"][0], tmp_path / "lora")
    (folder / MANIFEST_FILE).write_text("{}")
    assert compile_adapter(folder, base).method == "LoRA"


# hostile folders: (kind, change to the manifest or the tensors, code, what the sentence names)


def fields(**changes):
    return lambda manifest: manifest.update(changes)


def member(**changes):
    return lambda manifest: manifest["members"][Q].update(changes)


def term(**changes):
    return lambda manifest: manifest["members"][Q]["terms"][0].update(changes)


def pair(**changes):
    return lambda manifest: manifest["pair"].update(changes)


VERA_TERM = {"c": 1.0, "rank": 4, "shared": True, "vectors": ["d", "e"]}
BAD_MANIFESTS = [
    *[("lora", fields(format=f), Code.COMPILED_VERSION, f"format {f}") for f in (0, 2, -1, 10**30)],
    *[("lora", fields(format=f), Code.COMPILED_MANIFEST, "format") for f in (None, "1", [1], True, 1.0)],
    ("lora", lambda m: m.pop("format"), Code.COMPILED_MANIFEST, "format"),
    ("lora", lambda m: m.pop("weights"), Code.COMPILED_MANIFEST, "weights"),
    ("lora", fields(extra=1), Code.COMPILED_MANIFEST, "extra"),
    ("lora", fields(method=None), Code.COMPILED_MANIFEST, "method"),
    ("lora", fields(members=[]), Code.COMPILED_MANIFEST, "members"),
    ("lora", member(slots=["z"]), Code.COMPILED_MANIFEST, "slots"),
    ("lora", member(slots=["R", "b.replaced", "b.shift"]), Code.COMPILED_MANIFEST, "block_width"),
    ("lora", member(block_width=-4), Code.COMPILED_MANIFEST, "block_width"),
    ("lora", term(c=float("nan")), Code.COMPILED_MANIFEST, "c"),
    ("lora", term(rank=0), Code.COMPILED_MANIFEST, "rank"),
    ("lora", term(rank=True), Code.COMPILED_MANIFEST, "rank"),
    ("lora", term(shared=True), Code.COMPILED_MANIFEST, "pair"),
    ("dora", member(slots=["magnitude", "s"]), Code.COMPILED_MANIFEST, "magnitude"),
    ("dora", term(vectors=["e"]), Code.COMPILED_MANIFEST, "magnitude"),
    ("vera", fields(pair=None), Code.COMPILED_MANIFEST, "pair"),
    ("vera", member(terms=2 * [VERA_TERM]), Code.COMPILED_MANIFEST, "one term on the pair"),
    ("vera", pair(rank=5), Code.COMPILED_MANIFEST, "rank of the pair"),
    ("vera", pair(inputs=20), Code.COMPILED_MANIFEST, "widest"),
    ("vera", pair(inputs=30), Code.TENSOR_SHAPE, "pair.A"),
    ("vera", pair(drawn_from=3), Code.TENSOR_LEFT_OVER, "pair.A"),
    ("vera_drawn", pair(inputs=10**12), Code.COMPILED_MANIFEST, "widest"),
    ("vera_drawn", pair(drawn_from=2**64), Code.COMPILED_MANIFEST, "drawn_from"),
    ("vera_drawn", pair(drawn_from=None), Code.TENSOR_MISSING, "pair.A"),
    ("vera_drawn", lambda m: [e.update(rank=10**12) for e in terms_and_pair(m)], Code.TENSOR_SHAPE, f"{Q}.0.d"),
    (
        "vera_drawn",
        lambda m: [e.update(vectors=["e"]) for e in terms_and_pair(m)[1:]],
        Code.COMPILED_MANIFEST,
        "proves",
    ),
    ("lora", term(rank=10**30), Code.TENSOR_SHAPE, f"{Q}.0.A"),
    ("lora", member(slots=["b.replaced"]), Code.TENSOR_LEFT_OVER, f"{Q}.b.shift"),
    ("ia3", member(slots=["s", "b.shift"]), Code.TENSOR_MISSING, f"{Q}.b.shift"),
    ("oft", member(block_width=6), Code.TENSOR_SHAPE, f"{Q}.R"),
    ("oft", member(block_width=10**20), Code.TENSOR_SHAPE, f"{Q}.R"),
    ("lora", lambda m: m["members"].pop(Q), Code.TENSOR_LEFT_OVER, Q),
    ("lora", lambda m: m["members"].update(x=m["members"].pop(Q)), Code.TENSOR_NO_MODULE, "projection x"),
    ("lora", lambda m: m["base"].update(projections="0" * 64), Code.COMPILED_BASE, "'toy'"),
    ("lora", lambda m: m["weights"].update(sha256="0" * 64), Code.COMPILED_HASH, WEIGHTS_FILE),
    ("lora", lambda m: m["weights"].update(sha256="../../etc"), Code.COMPILED_MANIFEST, "sha256"),
]


def terms_and_pair(manifest):
    return [manifest["pair"], *(t for entry in manifest["members"].values() for t in entry["terms"])]


def refuse(folder, base, code, *culprits):
    with pytest.raises(Refusal) as refusal:
        compile_adapter(folder, base)
    assert refusal.value.code is code, str(refusal.value)
    reasons = Reasons(collect=True)
    assert find_form(folder, base, reasons) is None
    assert reasons.found[0].code is code
    for culprit in culprits:
        assert culprit in refusal.value.sentence


def edit(folder, change, *, sign):
    """sign: write the digest anew, so that what was changed has to be found by its meaning."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    digest = manifest.pop(DIGEST)
    change(manifest)
    manifest[DIGEST] = content_digest(manifest) if sign else digest
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


@pytest.mark.parametrize(("kind", "change", "code", "culprit"), BAD_MANIFESTS)
def test_manifest(kind, change, code, culprit, copy_of, base):
    folder = copy_of(kind)
    edit(folder, change, sign=True)
    refuse(folder, base, code, culprit)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("lora", term(c=3.0)),
        ("lora", fields(method="DoRA")),
        ("ia3", member(scales_bias=False)),
        ("vera_drawn", pair(drawn_from=7)),
        ("dora", lambda m: m["source"].update(folder="other")),
    ],
)
def test_a_manifest_that_was_edited(kind, change, copy_of, base):
    """Every one of them means something, and is found by the digest alone, without the tensors too."""
    folder = copy_of(kind)
    edit(folder, change, sign=False)
    refuse(folder, base, Code.COMPILED_HASH, MANIFEST_FILE)
    reasons = Reasons(collect=True)
    assert find_form(folder, base, reasons, values=False) is None
    assert reasons.found[0].code is Code.COMPILED_HASH
    edit(folder, lambda _: None, sign=True)
    assert compile_adapter(folder, base)


def test_a_manifest_without_a_digest(copy_of, base):
    folder = copy_of("lora")
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    del manifest[DIGEST]
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    refuse(folder, base, Code.COMPILED_HASH, DIGEST)


A = f"{Q}.0.A"
BAD_TENSORS = [
    (lambda t: t | {"x": torch.ones(1)}, Code.TENSOR_LEFT_OVER, "x"),
    (lambda t: {n: v for n, v in t.items() if n != A}, Code.TENSOR_MISSING, A),
    (lambda t: t | {A: t[A][:3]}, Code.TENSOR_SHAPE, A),
    (lambda t: t | {A: t[A].int()}, Code.TENSOR_DTYPE, A),
    (lambda t: t | {A: torch.full_like(t[A], torch.inf)}, Code.TENSOR_NOT_FINITE, A),
]


@pytest.mark.parametrize(("change", "code", "culprit"), BAD_TENSORS)
def test_tensors(change, code, culprit, copy_of, base):
    """Without a digest that fits, and with one: only a header is judged before the digest."""
    folder = copy_of("lora")
    save_file({n: v.contiguous() for n, v in change(load_file(folder / WEIGHTS_FILE)).items()}, folder / WEIGHTS_FILE)
    in_values = code is Code.TENSOR_NOT_FINITE
    refuse(folder, base, *((Code.COMPILED_HASH, WEIGHTS_FILE) if in_values else (code, culprit)))
    edit(folder, lambda m: m["weights"].update(sha256=file_digest(folder / WEIGHTS_FILE)), sign=True)
    refuse(folder, base, code, culprit)


def test_files(copy_of, base):
    folder = copy_of("lora")
    os.truncate(folder / WEIGHTS_FILE, 100)
    refuse(folder, base, Code.FOLDER_UNREADABLE, WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()
    refuse(folder, base, Code.FOLDER_INCOMPLETE, WEIGHTS_FILE)
    for text in ("", "{", "[" * 100_000):
        (folder / MANIFEST_FILE).write_text(text)
        refuse(folder, base, Code.FOLDER_UNREADABLE, MANIFEST_FILE)
    (folder / MANIFEST_FILE).write_text("[]")
    refuse(folder, base, Code.COMPILED_MANIFEST, MANIFEST_FILE)
    (folder / MANIFEST_FILE).unlink()
    refuse(folder, base, Code.FOLDER_INCOMPLETE, "adapter_config.json")


def test_another_base_model(pairs):
    """Equal shapes are not enough: whether the MLP is gated decides where (IA)3 is served."""
    refuse(pairs["ia3"][1], BaseModel.from_module(toy(torch.float32), gated=True), Code.COMPILED_BASE, "'toy'")
