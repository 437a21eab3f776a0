"""The rows as short tables."""

from collections.abc import Iterable, Sequence

from steps.cases import CASES
from steps.record import Constants, RouteRow, Row

_ENGINES = ("scute", "stock", "stock-tuned")


def summary(lines: Sequence[Constants | Row | RouteRow]) -> str:
    """Everything that a result file says; the table that matters most comes last."""
    constants = [line for line in lines if isinstance(line, Constants)]
    rows = [line for line in lines if isinstance(line, Row)]
    routes = [line for line in lines if isinstance(line, RouteRow)]
    parts = [_head(c) for c in constants] + [kernel_table(rows), route_table(routes), scale_table(rows), table(rows)]
    return "\n\n".join(part for part in parts if part)


def _head(c: Constants) -> str:
    e = c.environment
    return (
        f"{e.device}, torch {e.torch}, triton {e.triton}, vLLM {e.vllm}, commit {e.commit[:9]}: copy"
        f" {c.bandwidth / 1e9:.0f} GB/s, in L2 {c.cached_bandwidth / 1e9:.0f} GB/s, launch {1e3 * c.launch:.2f} us"
    )


def table(rows: Sequence[Row]) -> str:
    """A line a case and size: adapter ms in the step and alone, the bound, and the ratios to it and to stock."""
    found = {(row.case, row.engine, row.tokens): row for row in rows}
    lines = [
        f"{'case':13} {'rows':>5} | {'step-base':>9} {'alone':>8} {'bound':>7} {'ratio':>5} {'launches':>8} |"
        f" {'stock':>8} {'tuned':>8} | {'/tuned':>6} {'/lora16':>7} {'tuned conv/':>11} | {'step/base':>9}"
    ]
    for tokens in sorted({row.tokens for row in rows}):
        for name, case in CASES.items():
            row = found.get((name, "scute", tokens))
            if row is None:
                continue
            if row.performance is None:
                lines.append(f"{name:13} {tokens:5} | no time: {row.problem or row.correctness}")
                continue
            p = row.performance
            own, bound = _adapters(row), p.bound or p.alone_bound
            stock, tuned = (_adapters(found.get((name, engine, tokens))) for engine in _ENGINES[1:])
            lora = _adapters(found.get(("lora-16", "stock-tuned", tokens)))
            converted = _adapters(found.get((f"lora-{case.converted_rank}", "stock-tuned", tokens)))
            step = p.step.median / p.base.median if p.step and p.base else None
            lines.append(
                f"{name:13} {tokens:5} | {_ms(p.adapters, 9)} {_ms(p.alone.median, 8)} {_ms(bound, 7)}"
                f" {_ratio(own, bound, 5)} {p.step_launches or p.alone_launches or '-':>8} |"
                f" {_ms(stock, 8)} {_ms(tuned, 8)} | {_ratio(own, tuned, 6)} {_ratio(own, lora, 7)}"
                f" {_ratio(converted, own, 11)} | {_ratio(step, 1.0, 9)}"
            )
    lines += [
        "",
        f"{'stock':13} {'rows':>5} | {'engine':11} {'step-base':>9} {'alone':>8} {'bound':>7} {'step/base':>9}",
    ]
    for row in rows:
        if row.engine != "scute" and row.performance is not None:
            p = row.performance
            step = p.step.median / p.base.median if p.step and p.base else None
            lines.append(
                f"{row.case:13} {row.tokens:5} | {row.engine:11} {_ms(p.adapters, 9)} {_ms(p.alone.median, 8)}"
                f" {_ms(p.bound, 7)} {_ratio(step, 1.0, 9)}"
            )
    return "\n".join(lines) + "\n" + _problems(rows)


def scale_table(rows: Sequence[Row]) -> str:
    """DoRA's scale carried in the expand against the plain expand: whole adapter work, and the expand kernel alone."""
    found = {(row.case, row.engine, row.tokens): row for row in rows}
    lines = []
    for tokens in sorted({row.tokens for row in rows}):
        pair = [found.get((case, "scute", tokens)) for case in ("dora-16", "lora-16")]
        dora, lora = (row.performance if row is not None else None for row in pair)
        if dora is not None and lora is not None:
            expands = [sum(ms for name, ms in p.kernels.items() if "expand" in name) for p in (dora, lora)]
            lines.append(
                f"scale in the expand, {tokens} rows: adapter work {dora.alone.median / lora.alone.median:.3f},"
                f" expand kernel {expands[0] / expands[1] if expands[1] else float('nan'):.3f} of the plain ones"
            )
    return "\n".join(lines)


def kernel_table(rows: Iterable[Row]) -> str:
    """Milliseconds by kernel in the adapter work of every case."""
    lines = []
    for row in rows:
        if row.performance is not None and row.performance.kernels:
            parts = sorted(row.performance.kernels.items(), key=lambda item: -item[1])[:4]
            lines.append(
                f"{row.case:13} {row.tokens:5} {row.engine:11} " + ", ".join(f"{n[:28]} {ms:.3f}" for n, ms in parts)
            )
    return "\n".join(lines)


def route_table(rows: Sequence[RouteRow]) -> str:
    """Time over the plain expand's for each route and projection, and the byte model's error, as Table A7."""
    if not rows:
        return ""
    lines = [f"{'route':15} {'rows':>5} {'projection':>10} | {'plain us':>9} {'us':>9} {'ratio':>6} {'predicted':>9}"]
    lines += [
        f"{r.route:15} {r.tokens:5} {r.projection:>10} | {r.plain:9.1f} {r.time:9.1f} {r.ratio:6.3f}"
        f" {r.predicted / r.plain:9.3f}{f', expand kernel {r.expand_ratio:.3f}' if r.expand_ratio else ''}"
        for r in rows
    ]
    for route in dict.fromkeys(r.route for r in rows):
        for large in (True, False):
            errors = sorted(
                abs(r.predicted - r.time) / r.time for r in rows if r.route == route and r.bytes_dominate == large
            )
            if errors:
                kind = "bytes" if large else "launches"
                lines.append(
                    f"{route:15} {len(errors)} cells where {kind} dominate: median error on total time"
                    f" {100 * errors[len(errors) // 2]:.1f} %"
                )
    return "\n".join(lines)


def _adapters(row: Row | None) -> float | None:
    if row is None or row.performance is None:
        return None
    p = row.performance
    return p.adapters if p.adapters is not None else p.alone.median


def _ms(value: float | None, width: int) -> str:
    return f"{value:{width}.3f}" if value is not None else " " * (width - 1) + "-"


def _ratio(value: float | None, over: float | None, width: int) -> str:
    return f"{value / over:{width}.2f}" if value is not None and over else " " * (width - 1) + "-"


def _problems(rows: Sequence[Row]) -> str:
    bad = [row for row in rows if row.problem or row.correctness is None or not row.correctness.passed]
    return "".join(f"NO TIME {r.case} {r.engine} {r.tokens}: {r.problem or r.correctness}\n" for r in bad)
