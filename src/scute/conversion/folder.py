"""A LoRA folder as PEFT 0.21 writes it, put in place at once or not at all."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from scute.admission.base import BaseModel
from scute.admission.sites import PREFIX
from scute.admission.tensors import CONFIG_FILE, TENSOR_FILE
from scute.algebra.form import Term


def check_place(out: Path, source: Path, *, force: bool) -> None:
    """Raises FileExistsError if something is at `out`, unless `force` is given and it is another adapter's folder."""
    if not out.exists():
        return
    if out.resolve() == source.resolve():
        raise FileExistsError(f"{out} is the adapter to convert")
    if not force:
        raise FileExistsError(f"{out} exists; --force replaces it")
    if not (out / CONFIG_FILE).is_file():
        raise FileExistsError(f"{out} has no {CONFIG_FILE}, so it is not replaced")


def write_lora(out: Path, terms: Mapping[str, Term], base: BaseModel, base_name: str) -> None:
    """Write the terms, by module, as the adapter folder `out`, in place of an adapter folder that is there.

    terms: a [in, r], b [r, out], float32, and nothing else; each module at its own rank, c = 1. base_name: what the
    config calls the base model.
    """
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        tensors = {}
        for module, term in terms.items():
            tensors[f"{PREFIX}{module}.lora_A.weight"] = term.a.T.contiguous()
            tensors[f"{PREFIX}{module}.lora_B.weight"] = term.b.T.contiguous()
        save_file(tensors, partial / TENSOR_FILE, metadata={"format": "pt"})
        config = lora_config({module: term.rank for module, term in terms.items()}, base, base_name)
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _put(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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


def _put(partial: Path, out: Path) -> None:
    """Rename `partial` to `out`; a folder that was there is only removed once the new one is in place."""
    old = out.with_name(f".{out.name}.old-{os.getpid()}")
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)
