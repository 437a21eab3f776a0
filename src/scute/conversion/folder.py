"""A LoRA folder as PEFT 0.21 writes it, put in place at once or not at all."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from scute.admission.base import BaseModel
from scute.admission.output import whole_folder
from scute.admission.sites import PREFIX
from scute.admission.tensors import CONFIG_FILE, TENSOR_FILE
from scute.algebra.form import Term

FILES = (CONFIG_FILE, TENSOR_FILE, "README.md")
"""All that a LoRA folder may hold for another one to take its place."""


def write_lora(out: Path, terms: Mapping[str, Term], base: BaseModel, base_name: str) -> None:
    """Write the terms, by module, as the adapter folder `out`, in place of what is there.

    terms: a [in, r], b [r, out], float32, and nothing else; each module at its own rank, c = 1. base_name: what the
    config calls the base model.
    """
    with whole_folder(out) as partial:
        tensors = {}
        for module, term in terms.items():
            tensors[f"{PREFIX}{module}.lora_A.weight"] = term.a.T.contiguous()
            tensors[f"{PREFIX}{module}.lora_B.weight"] = term.b.T.contiguous()
        save_file(tensors, partial / TENSOR_FILE, metadata={"format": "pt"})
        config = lora_config({module: term.rank for module, term in terms.items()}, base, base_name)
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def lora_config(ranks: Mapping[str, int], base: BaseModel, base_name: str) -> dict[str, Any]:
    """adapter_config.json of a LoRA with c = 1 everywhere; the most frequent rank is r, the others are patterns."""
    (rank, _), *_ = Counter(ranks.values()).most_common(1)
    others = {module: other for module, other in ranks.items() if other != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": _targets(ranks, base),
        "bias": "none",
        "fan_in_fan_out": any(base.projections[module].transposed for module in ranks),
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _targets(ranks: Mapping[str, int], base: BaseModel) -> list[str]:
    """The last parts of the modules' names if they mean these modules only, else the whole names."""
    parts = {module.rpartition(".")[2] for module in ranks}
    meant = [name for name in base.projections if name.rpartition(".")[2] in parts]
    return sorted(parts if len(meant) == len(ranks) else ranks)
