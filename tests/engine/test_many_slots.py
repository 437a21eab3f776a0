"""As many slots as the paper's largest pool has tenants, and more: 1,040 adapters are loaded and served."""

import pytest
from conftest import ask, disagreement, start, stop
from vllm.lora.request import LoRARequest

from scute.testing.tiny import tiny_prompts

pytestmark = pytest.mark.engine

BOUND = 1e-4
SLOTS = 1040
MIB = 1 / 1024


def test_1040_slots(world):
    """Every slot is taken; then one batch has every 19th adapter and base rows, from all over the arena."""
    options = {"adapter_memory_gib": 300 * MIB}
    llm = start(world, dtype="float32", max_loras=SLOTS, max_cpu_loras=SLOTS, additional_config={"scute": options})
    try:
        names = list(world.folders)
        requests = []
        for number in range(1, SLOTS + 1):
            name = names[number % len(names)]
            requests.append(LoRARequest(f"{name} {number}", number, world.folders[name]))
            llm.llm_engine.add_lora(requests[-1])
        assert set(llm.llm_engine.list_loras()) == set(range(1, SLOTS + 1))
        chosen = [*requests[::19], None]
        prompt = tiny_prompts(1)[0]
        served = ask(llm, [(request, prompt) for request in chosen], max_tokens=2)
    finally:
        stop(llm)
    for name in [None, *names]:
        mine = [
            row
            for row, request in zip(served, chosen, strict=True)
            if (None if request is None else request.lora_name.split()[0]) == name
        ]
        assert mine
        assert disagreement(world, name, mine) <= BOUND, name
