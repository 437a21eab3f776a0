"""The search for block sizes, on Triton's interpreter: what it overrides, what it leaves out, what it writes."""

import dataclasses
import inspect
import json
import math
import os

import pytest
import torch

from scute.costs import Device
from scute.kernels import sizes as measured
from scute.tuning import table
from scute.tuning.candidates import _KNOWN, known, merge, neighbours
from scute.tuning.compilers import Compilers
from scute.tuning.floor import floor_us
from scute.tuning.layers import Adapter, LayerShape
from scute.tuning.problems import Instance, Problem, asked, replaced, rules, using
from scute.tuning.search import NEAR, Search, Settings, problems
from scute.tuning.truth import TOLERANCE

QKV = LayerShape("qkv", 64, (48, 16, 16))
KINDS = {"rank": Adapter(rank=5), "shared": Adapter(shared=True), "rotation": Adapter(rotation_width=16)}
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for the CPU")


def instance(kind: str, tokens: int = 10) -> Instance:
    return Instance(Problem(QKV, tokens, KINDS[kind], 3, torch.float32, 16), 1, CPU)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [10, 300])
def test_the_kernels_are_right_on_what_is_timed(kind, tokens):
    assert instance(kind, tokens).check().passed


def test_rules_are_watched_and_replaced():
    problem = instance("rank")
    found = asked(problem)
    assert found
    for rule, (arguments, sizes) in found.items():
        assert rules()[rule](*arguments) == sizes
        other = next(iter(neighbours(sizes)))
        with using({rule: other}):
            assert getattr(measured, rule)(*arguments) == other
        assert getattr(measured, rule)(*arguments) == sizes


def test_neighbours_change_one_field():
    (_, sizes), *_ = asked(instance("rank")).values()
    others = list(neighbours(sizes))
    assert len(set(others)) == len(others) > 2 * len(sizes) - 2
    first = {name: value for name, value in others[0]._asdict().items() if value != getattr(sizes, name)}
    last = {name: value for name, value in others[-1]._asdict().items() if value != getattr(sizes, name)}
    merged = merge(sizes, [others[0], others[-1]])
    assert merged == sizes._replace(**last, **first)


@pytest.mark.parametrize("rule", measured.RULES)
def test_what_was_good_elsewhere_fits_the_rules(rule):
    fields = inspect.signature(measured.RULES[rule]).return_annotation._fields
    sizes = inspect.signature(measured.RULES[rule]).return_annotation(*range(1, len(fields) + 1))
    assert _KNOWN.keys() == measured.RULES.keys()
    assert len(list(known(rule, sizes))) == len(_KNOWN[rule])


@pytest.fixture
def few(monkeypatch):
    """Says which neighbours a search tries."""

    def use(part: slice) -> None:
        monkeypatch.setattr("scute.tuning.search.known", lambda *_: iter(()))
        monkeypatch.setattr("scute.tuning.search.neighbours", lambda sizes: list(neighbours(sizes))[part])
        monkeypatch.setattr("scute.tuning.search.HOPELESS", math.inf)  # a busy machine is no reason to give up

    return use


class Silent:
    def __call__(self, doing: str = "", steps: int = 0, more: int = 0) -> None:
        pass


SETTINGS = Settings(
    tokens=(10,),
    tenants=2,
    ranks=(4,),
    shared_rank=0,
    rotation_width=0,
    dtype=torch.float32,
    rounds=1,
    copies=1,
    repeats=1,
)


def test_a_search_writes_a_table(tmp_path, few):
    few(slice(-2, None))
    entries = Search(SETTINGS, CPU, Silent()).run([QKV])
    assert [entry.rule for entry in entries] == list(asked(instance("rank")))
    assert all(entry.ratio <= 1 for entry in entries)
    for _ in range(2):  # the second time replaces the entries
        path = table.write(tmp_path, "NVIDIA Some/GPU", entries, "a test")
    assert measured.read(path, "NVIDIA Some/GPU") == [entry.override for entry in entries]
    assert path.name == "nvidia_some_gpu.json"


def test_writing_drops_what_the_kernels_would_not_take(tmp_path):
    path = tmp_path / "gpu.json"
    old = {"rule": "decode_blocks", "arguments": {}, "blocks": {"no_such_field": 1}}
    path.write_text(json.dumps({"device": "GPU", "entries": [old]}))
    pair = table.Entry("decode_blocks", {"shared_rank": 8}, {"expand_registers": 168}, [], 1.0, 1.0, 1.0, 1, 0)
    plain = table.Entry("decode_blocks", {}, {"expand_registers": 128}, [], 1.0, 1.0, 1.0, 1, 0)
    for entry in (pair, plain):
        assert table.write(tmp_path, "GPU", [entry], "a test") == path
    assert measured.read(path, "GPU") == [plain.override, pair.override]


@pytest.mark.parametrize(("bandwidth", "is_searched"), [(1e-9, False), (1e9, True)], ids=["near", "far"])
def test_what_is_near_its_bytes_is_not_searched(few, bandwidth: float, is_searched: bool):
    few(slice(-2, None))
    entries = Search(SETTINGS, CPU, Silent(), Device("GPU", bandwidth, launch_us=1e-6)).run([QKV])
    assert entries
    for entry in entries:
        assert (entry.tried > 1) == is_searched
        assert (entry.rule_us > NEAR * entry.floor_us) == is_searched


def test_the_floor_is_that_of_the_byte_model():
    """By hand: A and B of two tenants, x and y of their rows, and two launches."""
    problem = Problem(LayerShape("o", 64, (32,)), 10, Adapter(rank=4), 2, torch.float16)
    moved = 2 * 4 * (64 + 32) * 2 + 10 * 64 * 2 + 2 * 10 * 32 * 2
    assert floor_us(problem, Device("GPU", 1.0, launch_us=2.0)) == pytest.approx(1e-3 * moved + 2 * 2)


def test_wrong_sizes_are_left_out(monkeypatch, few):
    """A kernel that is wrong for every candidate but the rule's own."""
    few(slice(-2, None))
    right = {rule: sizes for rule, (_, sizes) in asked(instance("rank")).items()}
    run = Instance._run

    def broken(self, layer, index, y):
        out = run(self, layer, index, y)
        if any(getattr(measured, rule)(*self.arguments[rule]) != sizes for rule, sizes in right.items()):
            out[0, 0] += 100 * TOLERANCE[torch.float32]
        return out

    Instance.arguments = {rule: arguments for rule, (arguments, _) in asked(instance("rank")).items()}
    monkeypatch.setattr(Instance, "_run", broken)
    entries = Search(SETTINGS, CPU, Silent()).run([QKV])
    assert all(entry.tried == 1 and entry.wrong for entry in entries)
    for entry in entries:
        assert entry.blocks.items() <= right[entry.rule]._asdict().items()


def test_what_is_found_without_a_pair_holds_with_one(few):
    few(slice(1))
    settings = dataclasses.replace(SETTINGS, shared_rank=16)
    entries = Search(settings, CPU, Silent()).run([QKV])
    plain = {name for e in entries if "shared_rank" not in e.arguments for name in e.blocks}
    with_pair = {name for e in entries if "shared_rank" in e.arguments for name in e.blocks}
    assert plain
    assert not any(name.startswith("shared_") for name in plain)
    assert {name for name in with_pair if not name.startswith("shared_")} == measured.WITH_A_PAIR
    for entry in entries:
        assert measured.Override.parse({**dataclasses.asdict(entry)}) == entry.override


def test_time_runs_out():
    search = Search(dataclasses.replace(SETTINGS, seconds=0.0), CPU, Silent())
    assert search.run([QKV]) == []
    assert len(search.skipped) == len(asked(instance("rank")))


def test_problems_of_a_model():
    found = list(problems([QKV, LayerShape("odd", 60, (8,))], dataclasses.replace(SETTINGS, rotation_width=16)))
    assert [(p.shape.name, bool(p.adapter.rotation_width)) for p in found] == [
        ("qkv", False),
        ("odd", False),
        ("qkv", True),
    ]


def test_compilers_say_what_failed(monkeypatch):
    monkeypatch.setenv("SCUTE_SET", "it is set")
    with Compilers(2, os.getenv) as compilers:
        assert compilers.run(["SCUTE_NOT_SET", "SCUTE_SET", "SCUTE_NOT_SET_EITHER"], 60.0) == {
            "SCUTE_NOT_SET",
            "SCUTE_NOT_SET_EITHER",
        }
        assert compilers.failures == [("SCUTE_SET", "it is set")]
        assert compilers.run(["SCUTE_NOT_SET"], 0.0) == set()


def test_replacing_ends():
    before = [getattr(measured, rule) for rule in rules()]
    with pytest.raises(KeyError), replaced(dict.fromkeys(rules(), print)):
        raise KeyError
    assert [getattr(measured, rule) for rule in rules()] == before


def test_the_rows_of_a_gemm_follow_the_batch():
    sizes = measured.gemm_blocks(64, 4096, 2)._replace(outer=32)
    with using({"gemm_blocks": sizes}):
        assert measured.gemm_blocks(64, 4096, 2) == sizes
        assert measured.gemm_blocks(10, 4096, 2) == sizes._replace(rows=16)
