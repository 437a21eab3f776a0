"""Folders made to harm the engine: each is refused, in bounded time and memory and with a sentence of one line."""

import contextlib
import json
import struct
import time

import pytest
import torch
from peft import LoraConfig, OFTConfig, VeraConfig
from peft_oracle import rewrite_config, rewrite_tensors, save, toy

from scute.admission import BaseModel, compile_adapter, patterns
from scute.admission.compile import find_form
from scute.admission.reasons import Reasons
from scute.errors import LONGEST, Code, Refusal

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


def test_an_expression_that_takes_too_long(monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.05)
    with pytest.raises(Refusal, match="nested repetition") as refusal:
        patterns.whole_name("([a-z]|[a-z0-9])*[A-Z]").fullmatch("a" * 200)
    assert refusal.value.code is Code.CONFIG_INVALID


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
