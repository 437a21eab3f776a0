"""Adapters of every method, loaded, asked and unloaded again and again: what stays in memory?

    python benchmarks/cycles.py --cycles 1000 --out cycles.json

Each cycle loads one adapter under a new id, as the API server does, has it answer, and unloads it. The resident memory
of every process of the engine, and of the front end, is read after each cycle. Growth is counted from cycle 100 on,
before which caches fill, and also in bytes a cycle, beside the bytes of an adapter.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import tiny_engine

from scute.admission.compiled.manifest import tensor_file
from scute.testing.tiny import tiny_prompts

WARM = 100
BOUND = 0.02


def run(llm: Any, folders: Mapping[str, Path], cycles: int, first_id: int = 1000) -> dict[str, list[int]]:
    """Resident bytes after every cycle, by process. Raises RuntimeError where an adapter stays behind."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    prompt = {"prompt_token_ids": tiny_prompts(1)[0]}
    parameters = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    names, engine = list(folders), llm.llm_engine
    resident: dict[str, list[int]] = {}
    for cycle in range(cycles):
        name, adapter_id = names[cycle % len(names)], first_id + cycle
        request = LoRARequest(f"{name}-{adapter_id}", adapter_id, str(folders[name]))
        engine.add_lora(request)
        llm.generate([prompt], parameters, lora_request=request, use_tqdm=False)
        engine.remove_lora(adapter_id)
        if adapter_id in engine.list_loras():
            raise RuntimeError(f"adapter {adapter_id} is still there")
        for label, process in processes().items():
            resident.setdefault(label, []).append(process.memory_info().rss)
    return resident


def processes() -> dict[str, psutil.Process]:
    """This one and those that it started, but for Python's helper that watches shared memory."""
    this = psutil.Process()
    alive = [p for p in this.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    others = [p for p in alive if "resource_tracker" not in " ".join(p.cmdline())]
    return {"front end": this} | {f"{number}: {p.name()}": p for number, p in enumerate(others)}


def growth(resident: list[int], warm: int = WARM) -> float:
    """Share by which the memory grew after the first `warm` cycles."""
    return kept(resident, warm) * (len(resident) - warm) / resident[warm]


def kept(resident: list[int], warm: int = WARM) -> float:
    """Bytes that a cycle leaves behind: the slope between the first and the last twentieth of those after `warm`."""
    width = max(1, (len(resident) - warm) // 20)
    first, last = resident[warm : warm + width], resident[-width:]
    return (statistics.median(last) - statistics.median(first)) / max(1, len(resident) - warm - width)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--dtype", default=tiny_engine.default_dtype())
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "scute-churn")
    parser.add_argument("--out", type=Path, default=Path("cycles.json"))
    arguments = parser.parse_args()
    _, base, folders = tiny_engine.make(arguments.work, arguments.dtype)
    options = {"dtype": arguments.dtype, "max_loras": 2, "max_cpu_loras": 2, "max_num_seqs": 8}
    llm = tiny_engine.start(base, **options | arguments.engine)
    start = time.perf_counter()
    resident = run(llm, folders, arguments.cycles)
    seconds = time.perf_counter() - start
    llm.llm_engine.engine_core.shutdown()
    mib = {label: [round(value / 2**20, 2) for value in values] for label, values in resident.items()}
    grown = {label: growth(values) for label, values in resident.items()}
    report = {
        "environment": tiny_engine.environment(),
        "options": options | arguments.engine,
        "cycles": arguments.cycles,
        "adapters": list(folders),
        "seconds": round(seconds, 1),
        "bound": BOUND,
        "growth_after_the_first_100": grown,
        "bytes_kept_a_cycle": {label: round(kept(values), 1) for label, values in resident.items()},
        "bytes_of_an_adapter_file": round(statistics.mean(tensor_file(f).stat().st_size for f in folders.values())),
        "resident_mib_every_50_cycles": {label: values[49::50] for label, values in mib.items()},
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return int(max(grown.values()) >= BOUND)


if __name__ == "__main__":
    sys.exit(main())
