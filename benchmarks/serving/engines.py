"""Engines that are timed, and the arguments that they start with."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SEQUENCES = 64
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
COMMON: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": SEQUENCES,
    "max_num_batched_tokens": 8192,
    "max_model_len": 1024,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "seed": 0,
}


@dataclass(frozen=True, slots=True)
class EngineKind:
    """loras: adapters in a batch, 0 for an engine without LoRA. restricted: linear projections only, so not the head.

    tuned: vLLM's kernels read their configuration from a folder that a grid search wrote.
    """

    name: str
    loras: int = 0
    rank: int = 16
    scute: bool = False
    restricted: bool = False
    tuned: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scores_prompts(self) -> bool:
        """Not where vLLM has wrapped the head: it applies the rows of the sampler to the rows of the prompts."""
        return not self.loras or self.restricted or self.scute

    def arguments(self, held: int, spare: int = 0) -> dict[str, Any]:
        """Of vLLM's AsyncEngineArgs, beside the model; `held` adapters stay in host memory, `spare` slots empty."""
        if not self.loras:
            return dict(COMMON)
        slots = self.loras + spare
        lora = {
            "enable_lora": True,
            "max_loras": slots,
            "max_cpu_loras": max(slots, held),
            "max_lora_rank": self.rank,
        }
        if self.restricted:
            lora["lora_target_modules"] = list(PROJECTIONS)
        if self.options:
            lora["additional_config"] = {"scute": dict(self.options)}
        return COMMON | lora

    def environment(self, tuned: Path | None) -> dict[str, str]:
        """Variables of the process, beside those of this one; Scute loads by its entry point unless told not to."""
        variables = {} if self.scute else {"VLLM_PLUGINS": ""}
        if self.tuned and tuned is not None:
            variables["VLLM_TUNED_CONFIG_FOLDER"] = str(tuned.resolve())
        return variables


BASE = EngineKind("base")
STOCK = EngineKind("stock", loras=20)
STOCK_TUNED = EngineKind("stock-tuned", loras=20, restricted=True, tuned=True)
# Stock with the head left out alone: says how much of the difference the configurations make.
STOCK_RESTRICTED = EngineKind("stock-restricted", loras=20, restricted=True)
# Room for every pool: five adapters of rank 256 are 6.3 GiB.
SCUTE = EngineKind("scute", loras=20, scute=True, options={"adapter_memory_gib": 10})
SCUTE_LORA = replace(SCUTE, name="scute-lora", options={"rotation_width": 0, "shared_pairs": 0})

ENGINES: Mapping[str, EngineKind] = {
    engine.name: engine
    for engine in [
        BASE,
        STOCK,
        STOCK_TUNED,
        STOCK_RESTRICTED,
        SCUTE,
        SCUTE_LORA,
        replace(STOCK, name="stock-64", rank=64),
        replace(STOCK_TUNED, name="stock-tuned-64", rank=64),
        replace(STOCK, name="stock-256", rank=256),
        replace(STOCK_TUNED, name="stock-tuned-256", rank=256),
    ]
}


def profiler(on_cpu: bool) -> dict[str, Any]:
    """vLLM's profiler_config without its folder. It records nothing until it is started.

    A device's events alone: recording the host's operators would slow down the host that is to be judged.
    """
    return {
        "profiler": "torch",
        "torch_profiler_activities": ["CPU" if on_cpu else "CUDA"],
        "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
    }


def inherited() -> dict[str, str]:
    """This process's environment without what would decide for an engine."""
    return {k: v for k, v in os.environ.items() if k not in ("VLLM_PLUGINS", "VLLM_TUNED_CONFIG_FOLDER")}
