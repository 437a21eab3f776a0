"""Ranks and pipeline stages admit an adapter together or not at all, and none of them waits for another."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed
import torch.multiprocessing

from scute.engine import admit
from scute.errors import Code, Refusal

RANKS = 2
SECONDS = 120
STEPS: list[set[int]] = [set(), {0}, set(), {1}, {0, 1}, set()]
"""The ranks that fail in each step; all of them run in the same two processes, one after the other."""

REFUSAL = Refusal(Code.TENSOR_MISSING, "adapter_model.safetensors has no tensor q_proj.lora_A.")
ALONE = SimpleNamespace(world_size=1)


def attempt(fails: bool) -> str:
    """What a rank reports of one step: its refusal, or that it admitted the adapter."""
    try:
        with admit._AllOrNone() as agreement:
            if fails:
                raise REFUSAL
            agreement.succeed()
    except Refusal as refusal:
        return str(refusal)
    return "admitted"


def rank_main(rank: int, root: str) -> None:
    """All steps as two tensor-parallel ranks, then as two pipeline stages."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=RANKS)
    both = SimpleNamespace(world_size=RANKS, cpu_group=torch.distributed.group.WORLD)
    outcomes = {}
    for kind, (tensor, pipeline) in {"tensor": (both, ALONE), "pipeline": (ALONE, both)}.items():
        admit.get_tp_group, admit.get_pp_group = lambda group=tensor: group, lambda group=pipeline: group
        outcomes[kind] = [attempt(rank in failing) for failing in STEPS]
    Path(root, f"{rank}.json").write_text(json.dumps(outcomes))
    torch.distributed.barrier()
    os._exit(0)  # threads of gloo that still run abort some of the interpreter's own exits


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """What each rank reported of every step."""
    root = tmp_path_factory.mktemp("ranks")
    ranks = torch.multiprocessing.spawn(rank_main, args=(str(root),), nprocs=RANKS, join=False)
    end = time.monotonic() + SECONDS
    while not ranks.join(timeout=1):
        if time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            pytest.fail("a rank waits for another")
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
@pytest.mark.parametrize("step", range(len(STEPS)), ids=[f"{sorted(failing)}-fail" for failing in STEPS])
def test_all_or_none(outcomes, kind: str, step: int):
    failing = STEPS[step]
    for rank in range(RANKS):
        found = outcomes[rank][kind][step]
        if rank in failing:
            assert found == str(REFUSAL)
        elif failing:
            assert found.startswith(f"[scute:{Code.PEER_RANK_FAILED}] ")
        else:
            assert found == "admitted"


def test_one_rank_alone_needs_no_group(monkeypatch):
    monkeypatch.setattr(admit, "get_tp_group", lambda: ALONE)
    monkeypatch.setattr(admit, "get_pp_group", lambda: ALONE)
    assert attempt(fails=False) == "admitted"
    assert attempt(fails=True) == str(REFUSAL)
