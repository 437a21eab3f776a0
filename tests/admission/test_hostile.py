"""Folders made to harm the engine: each is refused, in bounded time and memory and with a sentence of one line."""

import contextlib
import json
import os
import struct
import time

import pytest
import torch
from peft import LoraConfig, OFTConfig, VeraConfig
from peft_oracle import rewrite_config, rewrite_tensors, save, toy

from scute.admission import BaseModel, compile_adapter, memory, safetensors_file
from scute.admission.compile import find_form
from scute.admission.methods import vera
from scute.admission.reasons import Reasons
from scute.admission.safetensors_file import SafetensorsFile
from scute.errors import LONGEST, Code, Refusal

TENSORS = "adapter_model.safetensors"
A = "base_model.model.layers.0.self_attn.q_proj.lora_A.weight"
LORA = LoraConfig(target_modules=["q_proj", "v_proj"], r=4)


@pytest.fixture(scope="module")
def base():
    return BaseModel.from_module(toy(torch.float32))


@pytest.fixture
def lora(tmp_path):
    save(tmp_path, toy(torch.float32), LORA)
    return tmp_path


def refused(folder, base) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        compile_adapter(folder, base)
    return refusal.value


@pytest.mark.parametrize("name", ["\ud800", "two\nlines", "\x1b[31mred", "x" * 10**6], ids=ascii)
def test_a_field_name_stays_one_printable_line(lora, base, name: str):
    rewrite_config(lora, **{name[:20] if len(name) < 100 else name: 1})
    refusal = refused(lora, base)
    assert refusal.code is Code.CONFIG_UNKNOWN_FIELD
    assert str(refusal).isprintable()
    assert str(refusal).encode("utf-8")
    assert len(refusal.sentence) <= LONGEST + 10


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_an_expression_that_would_backtrack_for_ever(lora, base, field: str):
    slow = "([a-z0-9_.]+)*!"
    rewrite_config(lora, **{field: {slow: 4} if field.endswith("pattern") else slow})
    start = time.monotonic()
    with contextlib.suppress(Refusal):
        compile_adapter(lora, base)
    assert time.monotonic() - start < 10


def test_very_many_expressions(lora, base):
    """Each is fast enough alone."""
    rewrite_config(lora, alpha_pattern={f"([a-z]|[a-z0-9])*_{i}": 4 for i in range(10**5)})
    start = time.monotonic()
    assert refused(lora, base).code is Code.CONFIG_INVALID
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("rank", [2 * 10**6, 10**12, 10**18, 10**30])
def test_a_rank_that_would_allocate_the_machine(tmp_path, base, rank: int):
    save(tmp_path, toy(torch.float32), VeraConfig(target_modules=["q_proj"], r=4, save_projection=False))
    rewrite_config(tmp_path, r=rank)
    assert refused(tmp_path, base).code is Code.TENSOR_SHAPE


def test_a_rotation_that_does_not_exist(tmp_path, base):
    save(tmp_path, toy(torch.float32), OFTConfig(target_modules=["q_proj"], oft_block_size=3, use_cayley_neumann=False))
    rewrite_tensors(tmp_path, lambda tensors: {name: torch.full_like(t, 1e20) for name, t in tensors.items()})
    assert refused(tmp_path, base).code is Code.TENSOR_NOT_FINITE


def test_a_name_of_very_many_modules(lora, base):
    rewrite_config(lora, modules_to_save=[f"module{i}" for i in range(10**5)])
    name = "base_model.model." + "a." * 10**5 + "weight"
    rewrite_tensors(lora, lambda tensors: tensors | {name: torch.ones(2)})
    start = time.monotonic()
    assert refused(lora, base).code is Code.CONFIG_UNSUPPORTED_FIELD
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("shape", [[0, 2**63], [2**64 - 1, 0], [0, 2**62, 2**62]])
@pytest.mark.parametrize("values", [True, False])
def test_a_shape_that_no_tensor_has(lora, base, shape: list[int], values: bool):
    name = "base_model.model.layers.0.self_attn.q_proj.lora_A.weight"
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (lora / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(Refusal):
        find_form(lora, base, Reasons(), values=values)


def header_of(folder) -> tuple[dict, bytes]:
    content = (folder / TENSORS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, content[8 + length :]


def write_header(folder, header: str, data: bytes) -> None:
    (folder / TENSORS).write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


@pytest.mark.parametrize("how", ["end", "header", "tensor", "rank"])
def test_a_sparse_file_is_not_read(lora, base, monkeypatch, how: str):
    """Terabytes on no disk; in the last case with a config that calls for them."""
    monkeypatch.setattr(SafetensorsFile, "read", lambda *_: pytest.fail("values were read"))
    size = 2**42
    if how == "header":
        (lora / TENSORS).write_bytes(struct.pack("<Q", size - 8))
    elif how in ("tensor", "rank"):
        rank = size // (4 * 24)
        entry = {"dtype": "F32", "shape": [rank, 24], "data_offsets": [0, rank * 24 * 4]}
        write_header(lora, json.dumps({A: entry}), b"")
        size = (lora / TENSORS).stat().st_size + rank * 24 * 4
        if how == "rank":
            rewrite_config(lora, r=rank)
    os.truncate(lora / TENSORS, size)
    assert refused(lora, base).code is Code.CAPACITY_HOST
    monkeypatch.setattr(memory, "most_bytes", lambda: 2**50)  # then its header tells
    assert refused(lora, base).code in {Code.FOLDER_UNREADABLE, Code.TENSOR_SHAPE, Code.TENSOR_MISSING}


def test_a_file_that_is_written_while_it_is_read(lora, base, monkeypatch):
    """By a training run: half of the old tensors and half of the new ones would be no adapter."""
    read, calls = SafetensorsFile.read, []

    def read_and_change(self, name):
        tensor = read(self, name)
        calls.append(name)
        if len(calls) == 2:
            (lora / TENSORS).write_bytes((lora / TENSORS).read_bytes())
        return tensor

    monkeypatch.setattr(SafetensorsFile, "read", read_and_change)
    refusal = refused(lora, base)
    assert refusal.code is Code.FOLDER_UNREADABLE
    assert "changed while it was read" in refusal.sentence


@pytest.mark.parametrize("part", ["tensors", "header"])
def test_a_write_that_went_on_while_the_file_was_read(lora, base, monkeypatch, part: str):
    """One write in place: the file has its size and its times from when that began."""
    header, data = header_of(lora)
    end = (lora / TENSORS).stat().st_size
    other = json.dumps(header, separators=(",", ":")).replace("layers.0", "layers.9").encode()
    start, late = (end - 500, bytes(500)) if part == "tensors" else (8, other.ljust(end - len(data) - 8))
    read, state_of, last = SafetensorsFile.read, safetensors_file._state_of, list(header)[-1]
    monkeypatch.setattr(safetensors_file, "_state_of", lambda status: state_of(status)[:3])  # as if it began earlier

    def read_then_write(self, name):
        tensor = read(self, name)
        if name == last:
            with (lora / TENSORS).open("r+b") as file:
                file.seek(start)
                file.write(late)
        return tensor

    monkeypatch.setattr(SafetensorsFile, "read", read_then_write)
    refusal = refused(lora, base)
    assert refusal.code is Code.FOLDER_UNREADABLE
    assert "changed while it was read; write a new version elsewhere and rename it" in refusal.sentence


@pytest.mark.parametrize(("settled", "times"), [(-60.0, 1), (60.0, 2)], ids=["settled", "fresh"])
def test_a_file_that_has_settled_is_read_once(lora, base, monkeypatch, settled: float, times: int):
    reads, content = [], SafetensorsFile._content
    monkeypatch.setattr(SafetensorsFile, "_content", lambda *args: reads.append(args) or content(*args))
    monkeypatch.setattr(safetensors_file, "SETTLED", settled)
    compile_adapter(lora, base)
    assert len(reads) == times * len(header_of(lora)[0])


def test_a_key_that_is_there_twice(lora, base):
    config = (lora / "adapter_config.json").read_text()
    (lora / "adapter_config.json").write_text('{"r": 4, ' + config.lstrip()[1:])
    refusal = refused(lora, base)
    assert refusal.code is Code.FOLDER_UNREADABLE
    assert "'r' is there twice" in refusal.sentence


def test_a_tensor_that_is_there_twice(lora, base):
    header, data = header_of(lora)
    text = json.dumps(header)
    write_header(lora, f"{text[:-1]}, {json.dumps(A)}: {json.dumps(header[A])}}}", data)
    refusal = refused(lora, base)
    assert refusal.code is Code.FOLDER_UNREADABLE
    assert "there twice" in refusal.sentence


def test_a_config_of_a_gigabyte(lora, base):
    os.truncate(lora / "adapter_config.json", 2**40)
    assert refused(lora, base).code is Code.FOLDER_UNREADABLE


def test_a_drawn_pair_that_would_fill_the_memory(tmp_path, base, monkeypatch):
    save(tmp_path, toy(torch.float32), VeraConfig(target_modules=["q_proj"], r=4, save_projection=False))
    monkeypatch.setattr(vera, "check_size", lambda what, size: memory.check_size(what, size * 2**40))
    assert refused(tmp_path, base).code is Code.CAPACITY_HOST
