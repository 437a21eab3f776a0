"""Adapters through vLLM and through the PEFT library, and how far apart the two are (paper, section 6.2)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scute.admission.base import BaseModel
from scute.admission.compile import compile_adapter
from scute.admission.compiled.manifest import is_compiled
from scute.admission.description import describe
from scute.admission.targets import refuse_output_head
from scute.agreement import Agreement, random_prompts
from scute.algebra.form import AdapterForm
from scute.costs.tenant import least_stock_rank
from scute.engine.offline import Batch, run_apart
from scute.errors import Refusal
from scute.testing.oracle import Oracle
from scute.testing.scoring import base_error, score
from scute.verify.modules import ModuleError, module_errors

PROMPTS, LENGTH = 4, 32
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One adapter. modules: where the normal form and PEFT part, worst first; only for one above the bound."""

    folder: str
    method: str
    agreement: Agreement
    modules: tuple[ModuleError, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """verdicts: in the order that was asked for; base_error: of the rows without an adapter, in nats a token."""

    verdicts: tuple[Verdict, ...]
    base_error: float

    def base_ratio(self, verdict: Verdict) -> float:
        """What the dtype of the engine alone costs: the error of base rows as a share of the adapter's effect."""
        return Agreement(verdict.agreement.effect, self.base_error).ratio


def verify(
    folders: Sequence[Path],
    base: BaseModel,
    base_folder: Path,
    bound: float,
    options: Mapping[str, Any],
    progress: Progress,
) -> Verification:
    """Serve every folder in one batch with base rows, random prompts and a few decoded tokens, and score each.

    base_folder: the model of `base`. bound: error / effect above which modules are compared. options: arguments of
    `vllm.LLM`, which replace those that the adapters ask for. progress is told what comes next.
    Raises Refusal for a folder that no engine admits; ValueError for a compiled one, and a base model that cannot be
    loaded; RuntimeError with the engine's last words if it fails, and for answers that are not finite.
    """
    forms = {str(folder): _compile(folder, base) for folder in folders}
    progress("the base model")
    oracle = _oracle(base_folder)
    prompts = random_prompts(oracle.base.config.get_text_config().vocab_size, PROMPTS, LENGTH)
    adapters = {folder: str(Path(folder).resolve()) for folder in forms}
    rows = [(name, index) for index in range(PROMPTS) for name in [None, *forms]]
    engine = {**_engine(tuple(forms.values()), len(rows)), **options}
    progress(f"vLLM: {len(rows)} requests in one batch")
    batch = Batch(base=str(base_folder), adapters=adapters, prompts=prompts, rows=rows, engine=engine, repeat=1)
    (served,) = run_apart(batch)
    progress("the PEFT library in float32")
    verdicts = []
    try:
        scores, rows_error = score(oracle, rows, served, adapters), base_error(oracle, rows, served)
    except ValueError as error:  # as NaN from the engine
        raise RuntimeError(f"the engine's answers cannot be compared with PEFT's: {error}") from error
    for name, agreed in scores.items():
        modules: tuple[ModuleError, ...] = ()
        if not agreed.ratio <= bound:
            progress(f"the modules of {name}")
            modules = module_errors(oracle.base, oracle.adapted(Path(name)), forms[name], base, prompts)
        verdicts.append(Verdict(name, forms[name].method, agreed, modules))
    return Verification(tuple(verdicts), rows_error)


def _oracle(folder: Path) -> Oracle:
    try:
        return Oracle(folder)
    except Exception as error:  # transformers raises whatever comes of the files
        raise ValueError(f"transformers cannot load the model of {folder}: {' '.join(str(error).split())}") from error


def _compile(folder: Path, base: BaseModel) -> AdapterForm:
    """The adapter that PEFT and the engine are to run; its refusals name the folder."""
    if is_compiled(folder):
        raise ValueError(
            f"{folder} is a compiled folder, which PEFT does not read; verify the adapter it was made from"
        )
    try:
        form = compile_adapter(folder, base)
        refuse_output_head(form.members, base)
    except Refusal as refusal:
        raise refusal.of(folder.name) from refusal
    return form


def _engine(forms: Sequence[AdapterForm], num_rows: int) -> dict[str, Any]:
    """The smallest engine that admits the adapters; on a CPU without compilation, which would take minutes."""
    found = [describe(form) for form in forms]
    rank = max((rank for one in found for rank in one.ranks), default=1)
    scute = {
        "rotation_width": max((width for one in found for width in one.rotation_widths), default=0),
        "shared_rank": max((shared for one in found for shared in one.shared_ranks), default=1),
        "shared_pairs": len(found) if any(one.shared_ranks for one in found) else 0,
    }
    return {
        "max_loras": len(found) + 1,
        "max_cpu_loras": len(found) + 1,
        "max_lora_rank": least_stock_rank(rank) or rank,
        "max_model_len": 128,
        "max_num_seqs": num_rows,
        "enforce_eager": not torch.cuda.is_available(),
        "gpu_memory_utilization": 0.5 if torch.cuda.is_available() else 0.1,
        "additional_config": {"scute": scute},
    }
