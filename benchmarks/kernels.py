"""Adapter kernels of a decode and of a prefill step, against vLLM's own and against bytes and launches.

    python3 benchmarks/kernels.py --out kernels.jsonl --tuned FOLDER --routes     # on the GPU
    python3 benchmarks/kernels.py --dry --out /tmp/kernels.jsonl --layers 1       # tiny shapes on the CPU, host clock
    python3 benchmarks/kernels.py --show kernels.jsonl
    ncu --profile-from-start off --set full --csv --log-file ncu.csv --page raw \
        python3 benchmarks/kernels.py --once --layers 1 --tokens 64 --cases five-methods --engines scute --out /dev/null

Every case is checked against float64 before it is timed; a case that is wrong has a row without a time. FOLDER is
what `python3 benchmarks/stock_tuning.py` wrote for vLLM.
"""

import argparse
import contextlib
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rows import Environment
from steps import cases, report
from steps.cases import CASES, STOCK_CASES, Case, least_bytes, slot_of_row
from steps.record import RouteRow, Row, append, read

if TYPE_CHECKING:
    from steps.arms import Arm

ROUTE_TOKENS = (64, 1024, 8192)
DRY_TOKENS = {64: 24, 1024: 40, 8192: 300}
DRY_TENANTS, DRY_SHARED_RANK = 5, 16


def main() -> None:
    arguments = parse()
    if arguments.show:
        print(report.summary(read(arguments.show)))
        return
    if arguments.out is None:
        sys.exit("--out is missing")
    with dry_stock() if arguments.dry else contextlib.nullcontext():
        if arguments.processes and not arguments.dry:
            from steps.compile_ahead import compile_ahead

            compile_ahead(arguments)
        run = Run(arguments)
        for tokens in arguments.tokens:
            run.step(tokens)
        if arguments.routes:
            run.routes()
    print(run.summary())


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines; new rows are appended")
    parser.add_argument("--show", type=Path, help="print the tables of a result file and do nothing else")
    parser.add_argument("--cases", type=_names, default=list(CASES), help="of: " + ", ".join(CASES))
    parser.add_argument("--engines", type=_names, default=["scute", "stock", "stock-tuned"])
    parser.add_argument("--stock-cases", type=_names, default=list(STOCK_CASES), help="LoRA pools that stock serves")
    parser.add_argument("--tuned", type=Path, help="folder of vLLM's tuned block sizes; without it, no stock-tuned")
    parser.add_argument("--tokens", type=_numbers, default=[cases.DECODE_TOKENS, cases.PREFILL_TOKENS])
    parser.add_argument("--layers", type=int, default=cases.LAYERS, help="layers recorded up to 1024 rows")
    parser.add_argument("--prefill-layers", type=int, default=8, help="layers recorded above that; scaled up")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--prefill-repeats", type=int, default=7)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--no-base", action="store_true", help="adapter kernels alone, no base GEMM")
    parser.add_argument("--routes", action="store_true", help="also the ways to apply DoRA's scale")
    parser.add_argument("--seconds", type=float, default=540.0, help="after which no further case is started")
    parser.add_argument("--processes", type=int, default=12, help="that compile ahead; 0 for none")
    parser.add_argument("--once", action="store_true", help="run every step once, for a profiler; time nothing")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU, to try the code")
    return parser.parse_args(given)


class Run:
    """One machine, one file of rows."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from steps import arms, constants

        from scute.tuning.timing import Clock

        self.arguments, self.start = arguments, time.monotonic()
        self.device = torch.device("cpu" if arguments.dry else "cuda")
        self.dtype = getattr(torch, arguments.dtype)
        self.shapes = cases.SMALL if arguments.dry else cases.LLAMA_8B
        self.tenants = DRY_TENANTS if arguments.dry else cases.TENANTS
        self.environment = Environment.here()
        self.clock = Clock(self.device)
        self.rows: list[Row] = []
        self.route_rows: list[RouteRow] = []
        self.skipped: list[str] = []
        self.constants = constants.measure(self.clock, self.environment)
        append(arguments.out, self.constants)
        copies = max(self.copies(tokens) for tokens in arguments.tokens)
        self.weights = arms.draw_weights(self.shapes, copies, self.dtype, self.device)

    def step(self, tokens: int) -> None:
        """Every engine on every case, with a batch of `tokens` rows."""
        from steps import arms, stock

        from scute.tuning.layers import Pool

        copies = self.copies(tokens)
        workload = arms.Workload(self.shapes, self.weights, copies, self._slots(tokens))
        base = None if self.arguments.no_base else self.clock.record(workload.step)
        sizes = self.shapes, copies, self.dtype, self.device
        shared_rank = DRY_SHARED_RANK if self.arguments.dry else cases.SHARED_RANK

        def own(case: Case) -> arms.Arm:
            return arms.ScuteArm(workload, Pool(case.adapters, *sizes, shared_rank=shared_rank))

        def stocks(case: Case) -> arms.Arm:
            return arms.StockArm(workload, stock.StockPool([a.rank for a in case.adapters], *sizes))

        for name in self.arguments.cases if "scute" in self.arguments.engines else ():
            self._measure(CASES[name], "scute", tokens, own, base)
        for name in self.arguments.stock_cases:
            for engine, folder in self.stock_engines():
                stock.use_configurations(folder)
                self._measure(STOCK_CASES[name], engine, tokens, stocks, base)

    def routes(self) -> None:
        """DoRA's scale in the expand and outside it, on each projection."""
        from steps import routes, stock

        stock.use_configurations(self.arguments.tuned)
        self.weights = []
        repeats = self.arguments.prefill_repeats
        for tokens in ROUTE_TOKENS:
            for shape in self.shapes:
                if self._is_over(f"routes {shape.name} {tokens}"):
                    continue
                measured = routes.measure(
                    self.clock, self.constants, shape, self._slots(tokens), self.copies(tokens), self.dtype, repeats
                )
                try:
                    for row in measured:
                        self.route_rows.append(row)
                        append(self.arguments.out, row)
                except Exception as error:
                    self._failed(f"routes {shape.name} {tokens}", error)
                del measured
                _free()

    def summary(self) -> str:
        skipped = f"\n\nskipped after {self.arguments.seconds:.0f} s: {', '.join(self.skipped)}" if self.skipped else ""
        return report.summary([self.constants, *self.rows, *self.route_rows]) + skipped

    def copies(self, tokens: int) -> int:
        return self.arguments.layers if tokens <= 1024 else min(self.arguments.layers, self.arguments.prefill_layers)

    def stock_engines(self) -> Iterator[tuple[str, Path | None]]:
        return stock_engines(self.arguments)

    def _slots(self, tokens: int) -> list[int]:
        return slot_of_row(DRY_TOKENS.get(tokens, tokens) if self.arguments.dry else tokens, self.tenants)

    def _measure(self, case: Case, engine: str, tokens: int, make: Callable, base: object) -> None:
        from steps.measure import Measurement

        name = f"{case.name} {engine} {tokens}"
        if self._is_over(name):
            return
        case = replace(case, adapters=case.adapters[: self.tenants])
        started, copies = time.monotonic(), self.copies(tokens)
        layers = copies if self.arguments.dry else cases.LAYERS
        repeats = self.arguments.repeats if tokens <= 1024 else self.arguments.prefill_repeats
        row = partial(
            Row,
            case=case.name,
            engine=engine,
            tokens=tokens,
            layers=layers,
            tenants=len(case.adapters),
            dtype=self.arguments.dtype,
            dry=self.arguments.dry,
            environment=self.environment,
        )
        try:
            arm = make(case)
            if self.arguments.once:
                self._once(arm)
                return
            least = least_bytes(case, self.shapes, copies, arm.workload.slots, self.dtype.itemsize)
            correctness, performance = Measurement(self.clock, repeats, layers / copies).run(arm, least, base)
            self.rows.append(row(correctness=correctness, performance=performance))
        except Exception as error:
            self.rows.append(row(problem=self._failed(name, error)))
        append(self.arguments.out, self.rows[-1])
        print(f"{self._seconds():5.0f} s  {name}: {time.monotonic() - started:.1f} s", flush=True)
        arm = None
        _free()

    def _once(self, arm: "Arm") -> None:
        """A step that is compiled, under `ncu --profile-from-start off`."""
        arm.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            arm.step()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()

    def _is_over(self, name: str) -> bool:
        over = self._seconds() > self.arguments.seconds
        if over:
            self.skipped.append(name)
        return over

    def _failed(self, name: str, error: Exception) -> str:
        """Say so and go on with the next case, unless the device is lost."""
        print(f"{name} failed", file=sys.stderr)
        traceback.print_exception(error, limit=-4)
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                print(self.summary())
                sys.stdout.flush()
                os._exit(1)
        return f"{type(error).__name__}: {str(error)[:300]}"

    def _seconds(self) -> float:
        return time.monotonic() - self.start


def stock_engines(arguments: argparse.Namespace) -> Iterator[tuple[str, Path | None]]:
    """(name, folder of its block sizes) of vLLM's arms."""
    if "stock" in arguments.engines:
        yield "stock", None
    if "stock-tuned" in arguments.engines and arguments.tuned is not None:
        yield "stock-tuned", arguments.tuned


@contextlib.contextmanager
def dry_stock() -> Iterator[None]:
    """vLLM's kernels in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    from steps.stock import DRY_CONFIGURATION, interpret_on_cpu, using

    interpret_on_cpu()
    with using(DRY_CONFIGURATION):
        yield


def _free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in _names(text)]


if __name__ == "__main__":
    main()
