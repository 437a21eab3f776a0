"""Tables of block sizes: whose is read, what it may change, and what happens to one that is no use."""

import inspect
import json
import logging
import os
import tomllib
from pathlib import Path

import pytest
import torch

from scute.kernels import blocks, launch, sizes

GPU = "NVIDIA Some/GPU"
ASKED = {"in_features": 4096, "out_features": 6144, "shared_rank": 0, "element_size": 2}
SIZES = blocks.decode_blocks(*ASKED.values())
ENTRY = {"rule": "decode_blocks", "arguments": {"in_features": 4096}, "blocks": {"outer": 64}}


def forget() -> None:
    sizes.overrides_of.cache_clear()
    sizes._device.cache_clear()
    for rule in sizes.RULES:
        getattr(sizes, rule).cache_clear()


@pytest.fixture(autouse=True)
def on_a_gpu(tmp_path, monkeypatch):
    """A GPU by its name alone, a user's folder, and a package's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sizes, "PACKAGED", tmp_path / "package")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: GPU)
    forget()
    yield
    forget()


def write(folder: Path, *entries: object, **data: object) -> Path:
    path = sizes.file_of(folder, GPU)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device": GPU, "entries": entries} | data))
    return path


def test_without_a_table_the_rules_answer():
    assert sizes.decode_blocks(*ASKED.values()) == SIZES


def test_the_users_table_comes_before_that_of_the_package():
    write(sizes.PACKAGED, ENTRY)
    assert sizes.decode_blocks(*ASKED.values()) == SIZES._replace(outer=64)
    forget()
    write(sizes.user_folder(), ENTRY | {"blocks": {"outer": 128}})
    assert sizes.decode_blocks(*ASKED.values()) == SIZES._replace(outer=128)


def test_a_question_is_answered_without_a_look_at_files_or_devices(monkeypatch):
    write(sizes.user_folder(), ENTRY)
    first = sizes.decode_blocks(*ASKED.values())

    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    monkeypatch.setattr(Path, "read_text", fail)
    assert sizes.decode_blocks(*ASKED.values()) is first
    assert sizes.decode_blocks(*{**ASKED, "in_features": 4097}.values()).outer == SIZES.outer
    assert sizes.gemm_blocks(64, 6144, 2) == blocks.gemm_blocks(64, 6144, 2)


def test_without_a_gpu_no_table_is_read(monkeypatch):
    write(sizes.user_folder(), ENTRY)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sizes.decode_blocks(*ASKED.values()) == SIZES


def test_entries_change_what_they_name():
    def changed(*entries: dict) -> blocks.DecodeBlocks:
        return sizes.overridden(map(sizes.Override.parse, entries), "decode_blocks", ASKED, SIZES)

    span = ENTRY | {"arguments": {"in_features": [4096, 2**30]}, "blocks": {"rank": 4}}
    assert changed(ENTRY, span) == SIZES._replace(outer=64, rank=4)
    assert changed(ENTRY | {"arguments": {}}) == SIZES._replace(outer=64)
    assert changed(ENTRY, ENTRY | {"blocks": {"outer": 32}}) == SIZES._replace(outer=32)
    assert changed(ENTRY | {"arguments": {"in_features": 4097}}) == SIZES
    assert changed(span | {"arguments": {"in_features": [4097, 2**30]}}) == SIZES
    assert changed({"rule": "rotate_blocks", "arguments": {}, "blocks": {"warps": 8}}) == SIZES


UNUSABLE = {
    "no JSON": "no JSON",
    "another format": "[]",
    "no entries": json.dumps({"device": GPU}),
    "another GPU": json.dumps({"device": "NVIDIA Some GPU", "entries": [ENTRY]}),
    **{
        name: json.dumps({"device": GPU, "entries": [ENTRY, {**ENTRY, **wrong}]})
        for name, wrong in {
            "unknown rule": {"rule": "lowrank_blocks"},
            "unknown argument": {"arguments": {"height": 16}},
            "no number": {"arguments": {"in_features": "4096"}},
            "three numbers": {"arguments": {"in_features": [1, 2, 3]}},
            "no arguments": {"arguments": None},
            "unknown field": {"blocks": {"outer": 64, "splits": 4}},
            "zero": {"blocks": {"outer": 0}},
            "no integer": {"blocks": {"outer": 64.0}},
            "sums that depend on VeRA": {"arguments": {"shared_rank": 0}, "blocks": {"inner": 1024}},
            "sums that depend on the batch": {
                "rule": "gemm_blocks",
                "arguments": {"tokens": [1, 16]},
                "blocks": {"inner": 64},
            },
        }.items()
    },
}


@pytest.mark.parametrize("text", UNUSABLE.values(), ids=UNUSABLE)
def test_a_table_of_no_use_is_a_warning_and_the_rules(text, caplog):
    write(sizes.PACKAGED, ENTRY)
    path = write(sizes.user_folder())
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert sizes.decode_blocks(*ASKED.values()) == SIZES
        assert sizes.decode_blocks(*{**ASKED, "element_size": 4}.values()).outer == SIZES.outer
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]


def test_a_table_that_is_no_text_or_no_file(caplog):
    path = write(sizes.user_folder())
    path.write_bytes(b"\xff\xfe")
    assert sizes.decode_blocks(*ASKED.values()) == SIZES
    forget()
    path.unlink()
    path.mkdir()
    assert sizes.decode_blocks(*ASKED.values()) == SIZES
    assert len(caplog.records) == 2


def test_what_may_depend_on_the_step():
    assert sizes.may_set("inner", ["in_features", "element_size"])
    assert sizes.may_set("shared_inner", ["in_features", "shared_rank"])
    assert sizes.may_set("expand_registers", ["shared_rank"])
    assert not sizes.may_set("ranks", ["shared_rank"])
    assert not sizes.may_set("outer", ["tokens"])
    assert not sizes.may_set("shared_inner", ["shared_rank", "tokens"])


def test_no_rule_lets_sums_depend_on_the_step():
    """What the table may not do, the rules do not do either; `rows` of a GEMM is not a sum."""
    for name, rule in sizes.RULES.items():
        asked = inspect.signature(rule).parameters
        plain = dict.fromkeys(asked, 64)
        for argument in sizes.STEPWISE & asked.keys():
            answers = [rule(**plain | {argument: value}) for value in (0, 1, 16, 64, 256)]
            differ = {f for f in answers[0]._fields if len({getattr(a, f) for a in answers}) > 1}
            assert all(field == "rows" or field.startswith("shared_") for field in differ), name


def test_the_users_folder(monkeypatch):
    assert sizes.user_folder() == Path(os.environ["XDG_CACHE_HOME"]) / "scute" / "blocks"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert sizes.user_folder() == Path("/home/someone/.cache/scute/blocks")


SHIPPED = sorted((Path(launch.__file__).parent / "tables").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_tables_of_the_package(path):
    data = json.loads(path.read_text())
    assert sizes.file_of(path.parent, data["device"]) == path
    assert sizes.read(path, data["device"]) == [sizes.Override.parse(entry) for entry in data["entries"]]
    assert data["provenance"]


def test_tables_go_into_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["scute.kernels"]
    assert sorted(path for p in patterns for path in Path(launch.__file__).parent.glob(p)) == SHIPPED
    assert SHIPPED
