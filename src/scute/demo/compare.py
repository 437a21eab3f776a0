"""The demo from end to end: write the adapters, ask the PEFT library, ask the engine, compare."""

from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scute.agreement import agreement, mean_difference
from scute.demo.base import base_folder
from scute.demo.footprint import footprint
from scute.demo.pool import NAMES, QUESTIONS, write_pool
from scute.demo.report import Row, adapter_row, base_row
from scute.demo.serve import serve
from scute.testing.oracle import Oracle

STEPS = len(NAMES) + 2
"""How often `compare` calls its `step`."""


def compare(cache: Path, step: Callable[[str], None]) -> list[Row]:
    """One row for the base model and one for each adapter; `step` is told what comes next, STEPS times."""
    step(f"the base model: fetched on the first run, then read from {cache}")
    base = base_folder(cache)
    tokenizer = AutoTokenizer.from_pretrained(base)
    oracle, prompts = Oracle(base), chat_prompts(tokenizer)
    base_reference = oracle.logprobs(prompts)
    tenants, references = [], []
    for tenant in write_pool(oracle.base, cache):
        step(f"the PEFT library in float32: {tenant.name}")
        tenants.append(tenant)
        references.append(oracle.logprobs(prompts, tenant.folder))
    step(f"vLLM: {(len(tenants) + 1) * len(prompts)} requests in one batch")
    served_base, *served = serve(base, tenants, prompts)
    answers = tokenizer.batch_decode([result.answer for result in (served_base, *served)], skip_special_tokens=True)
    rows = [base_row(mean_difference(served_base.logprobs, base_reference), answers[0])]
    for tenant, reference, result, answer in zip(tenants, references, served, answers[1:], strict=True):
        agreed = agreement(base_reference, reference, result.logprobs)
        rows.append(adapter_row(tenant, footprint(tenant.folder, base), agreed, answer))
    return rows


def chat_prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of the questions in the base model's chat template."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True).input_ids for c in chats]
