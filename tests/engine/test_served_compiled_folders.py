"""A compiled folder answers as its source does, in every bit; members of no PEFT file answer as plain torch does."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World, ask, start, stop
from transformers import PreTrainedModel
from vllm.lora.request import LoRARequest

from scute import costs
from scute.admission import compile_folder, write_folder
from scute.admission.base_folder import read_base
from scute.admission.compile import find_form
from scute.admission.reasons import Reasons
from scute.agreement import agreement
from scute.algebra import Member, Rotation, Term, evaluate, ssf
from scute.testing.adapters import AMPLIFIED
from scute.testing.oracle import Oracle, load_base
from scute.testing.tiny import tiny_prompts

pytestmark = pytest.mark.engine

BOUND = 1e-4
IDS = itertools.count(1)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def world(request, worlds) -> World:
    """Without and with biases."""
    return worlds(request.param, "float32")


@pytest.fixture(scope="module")
def engine(world) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions travel to the worker
        llm = start(world, dtype="float32", max_loras=4)
        yield llm
        stop(llm)


def answers(engine: Any, folder: Path | str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """One prompt at a time: which requests share a step is a matter of timing, and sums in a step depend on it."""
    number = next(IDS)
    request = LoRARequest(f"a{number}", number, str(folder))
    rows = [row for prompt in prompts for row in ask(engine, [(request, prompt)])]
    engine.llm_engine.remove_lora(number)
    return rows


@pytest.mark.parametrize("name", AMPLIFIED)
def test_the_same_answers_to_the_bit(name: str, world: World, engine: Any, tmp_path: Path):
    source, prompts = Path(world.folders[name]), tiny_prompts(2)
    compile_folder(source, tmp_path / "out", read_base(world.base))
    assert answers(engine, tmp_path / "out", prompts) == answers(engine, source, prompts)


def test_the_same_answers_on_two_ranks(worlds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing in a folder is cut for a rank, and each resolves a magnitude from the weights that it holds."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    world, prompts = worlds("llama", "float32"), tiny_prompts(1)
    llm = start(world, dtype="float32", tensor_parallel_size=2, max_loras=4)
    try:
        for name in ("dora", "ia3", "vera", "oft"):
            compile_folder(Path(world.folders[name]), tmp_path / name, read_base(world.base))
            assert answers(llm, tmp_path / name, prompts) == answers(llm, world.folders[name], prompts), name
    finally:
        stop(llm)


def stored_bytes(worker: Any) -> list[int]:
    """In the worker: the host buffers of all admitted adapters."""
    manager = worker.model_runner.lora_manager._adapter_manager
    return [packed.buffer.numel() for packed in manager.store.adapters().values()]


@pytest.mark.parametrize("name", AMPLIFIED)
def test_the_bytes_that_inspections_tell(name: str, world: World, engine: Any):
    base = read_base(world.base)
    form = find_form(Path(world.folders[name]), base, Reasons(), values=False)
    request = LoRARequest(name, next(IDS), world.folders[name])
    ask(engine, [(request, [1, 2, 3])])
    sizes = costs.Base.of(base, "")
    assert engine.collective_rpc(stored_bytes) == [[costs.Tenant.of(form, sizes, name).packed_bytes(sizes)]]
    engine.llm_engine.remove_lora(request.lora_int_id)


def members_of(base: PreTrainedModel, kind: str) -> dict[str, Member]:
    """Every projection of the layers, drawn far from the identity."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    members = {}
    for name, module in base.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        outputs, inputs = module.weight.shape
        member = ssf(1 + 0.3 * draw(outputs), 0.3 * draw(outputs))
        if kind == "every slot":
            blocks = torch.eye(16) + 0.05 * draw(inputs // 16, 16, 16)
            term = Term(draw(inputs, 4) / inputs**0.5, 0.3 * draw(4, outputs), 0.5, draw(4), draw(outputs))
            member = Member(Rotation(blocks), member.scale, member.bias, (term,))
        members[name] = member
    return members


def adapted(base: Path, members: dict[str, Member]) -> Oracle:
    """The base model with the formula in place of every adapted projection."""
    model = load_base(base)
    for name, member in members.items():
        linear = model.get_submodule(name)
        linear.forward = lambda x, m=member, to=linear: evaluate(m, x, to.weight.T, to.bias)
    return Oracle(model)


@pytest.mark.parametrize("kind", ["SSF", "every slot"])
def test_members_that_no_peft_folder_describes(kind: str, world: World, engine: Any, tmp_path: Path):
    members = members_of(world.oracle.base, kind)
    write_folder(tmp_path / "out", members, read_base(world.base), method=kind)
    rows = answers(engine, tmp_path / "out", tiny_prompts(2))
    sequences = [row["tokens"] for row in rows]
    served = [torch.tensor(row["logprobs"]) for row in rows]
    expected = adapted(world.base, members).logprobs(sequences)
    found = agreement(world.oracle.logprobs(sequences), expected, served)
    assert found.effect > 0.1
    assert found.ratio <= BOUND
