"""What serving a mix of methods costs: engines side by side on one GPU, under the loads of the paper's section 6.

    python benchmarks/serve.py run --plan pools --tuned CONFIGS --out benchmarks/results/serve-h200.jsonl
    python benchmarks/serve.py table benchmarks/results/serve-*.jsonl
    python benchmarks/serve.py table --write benchmarks/results/*.jsonl     # in README.md and docs/speed.md
    python benchmarks/serve.py plot benchmarks/results/serve-*.jsonl --out FOLDER
    python benchmarks/serve.py run --profile --plan rehearsal --repetitions 1 --out /tmp/profile.jsonl
    python benchmarks/serve.py profile /tmp/profile.jsonl                   # where the device's time went

Every engine is first held against the PEFT library in float32; one that is not right is not timed.
"""

import argparse
import json
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="start engines and time them")
    run.set_defaults(command=_run)
    run.add_argument("--plan", nargs="+", default=["pools"], help="plans of serving/plans.py, one after the other")
    run.add_argument("--engines", nargs="+", help="only these engines of the plans")
    run.add_argument("--cells", nargs="+", help="only cells whose name one of these regular expressions finds")
    run.add_argument("--model", choices=["tiny", "llama-8b"], default="llama-8b")
    run.add_argument("--layers", type=int, help="fewer layers than the model has")
    run.add_argument("--dtype", help="float16 on a GPU and float32 on a CPU if not given")
    run.add_argument("--seconds", type=float, default=540, help="after which no further round starts")
    run.add_argument("--start-seconds", type=float, default=360, help="after which a slow engine is left out")
    run.add_argument("--repetitions", type=int, help="of every cell, instead of the plan's number")
    run.add_argument("--requests", type=int, help="of every stream, instead of the plan's number")
    run.add_argument("--tuned", type=Path, help="folder of vLLM's tuned LoRA configurations")
    run.add_argument("--engine", type=json.loads, default={}, help="further arguments of every engine, as JSON")
    run.add_argument("--work", type=Path, default=Path("/tmp/scute-serve"), help="for models, tenants and caches")
    run.add_argument("--logs", type=Path, help="folder for the logs of all processes; the work folder if not given")
    run.add_argument("--out", type=Path, required=True, help="rows are appended to this file")
    run.add_argument("--profile", action="store_true", help="then profile every arm of each plan's first block")
    table = commands.add_parser("table", help="print the table of README.md")
    table.set_defaults(command=_table)
    table.add_argument("--write", action="store_true", help="put it into README.md, and the bounds into docs/speed.md")
    table.add_argument("results", type=Path, nargs="+")
    profile = commands.add_parser("profile", help="print where the device's time went, of rows of run --profile")
    profile.set_defaults(command=_profile)
    profile.add_argument("results", type=Path, nargs="+")
    plot = commands.add_parser("plot", help="draw figures; needs matplotlib")
    plot.set_defaults(command=_plot)
    plot.add_argument("--out", type=Path, required=True)
    plot.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    arguments.command(arguments)


def _run(arguments: argparse.Namespace) -> None:
    from serving import driver, plans
    from serving.session import Settings

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the engines are stopped too
    on_cpu = rows.Environment.here().device == "CPU"
    start = time.monotonic()
    run = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    logs = arguments.logs or arguments.work / "logs"
    for folder in (arguments.work, logs, arguments.out.parent):
        folder.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {text}", flush=True)

    for name in arguments.plan:
        plan = plans.narrowed(plans.PLANS[name], arguments.engines, arguments.cells)
        settings = Settings(
            work=arguments.work,
            out=arguments.out,
            logs=logs,
            model=arguments.model,
            layers=arguments.layers,
            dtype=arguments.dtype or ("float32" if on_cpu else "float16"),
            seconds=arguments.seconds - (time.monotonic() - start),
            start_seconds=arguments.start_seconds,
            tuned=arguments.tuned,
            engine=arguments.engine,
            requests=arguments.requests,
            repetitions=arguments.repetitions,
            profile=arguments.profile,
        )
        say(f"plan {name}: {', '.join(plans.engines_of(plan))}")
        driver.measure(settings, plan, f"{run}-{name}", say)


def _table(arguments: argparse.Namespace) -> None:
    from serving import bounds, summary

    table = summary.table(rows.read(arguments.results))
    if arguments.write:
        root = Path(__file__).parents[1]
        summary.write(root / "README.md", table)
        summary.write(root / "docs" / "speed.md", bounds.page(arguments.results))
    else:
        print(table)


def _profile(arguments: argparse.Namespace) -> None:
    from serving import profiles

    print(profiles.table(profiles.read(arguments.results)))


def _plot(arguments: argparse.Namespace) -> None:
    import plots

    for path in plots.draw(rows.read(arguments.results), arguments.out):
        print(path)


if __name__ == "__main__":
    main()
