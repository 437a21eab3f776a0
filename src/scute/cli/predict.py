"""`scute predict`: what a pool of adapters costs on a GPU, in time and memory, before anything runs."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scute.cli.base import numbers
from scute.cli.output import counted, print_json, print_refusal, print_table
from scute.errors import Refusal

if TYPE_CHECKING:
    from scute.costs import Arm, Prediction, Step

Folders = Annotated[list[Path], typer.Option(exists=True, file_okay=False, help="An adapter, or a folder of them.")]


def predict(
    base: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The base model's folder; its config.json is enough.")
    ],
    pool: Folders,
    gpu: Annotated[str, typer.Option("--gpu", "--device", help="Its name or a part of it, as h200.")],
    batch: Annotated[int, typer.Option(min=1, help="Rows of a decode step, spread over the adapters.")],
    prefill_tokens: Annotated[int, typer.Option(min=0, help="Rows of a prefill step; 0 for none.")] = 0,
    rank: Annotated[
        list[str] | None, typer.Option("--rank", "--ranks", help="To convert to LoRA at, as 16,64; 64 if none.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0.1, max=1e6, help="GiB of the GPU, instead of what is known.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw it here; needs matplotlib.")] = None,
) -> None:
    """Predict the time that adapters add to a step and the memory they take, as they are and converted to LoRA.

    Counts bytes and launches only, so times are a floor (docs/byte_model.md). Conversions are served by stock vLLM,
    which pads every adapter to one rank; adapters that are LoRA already keep theirs.
    """
    from scute import costs
    from scute.admission.inspection import adapters_in
    from scute.costs.figure import draw

    ranks = numbers(rank or ["64"], "--rank")
    try:
        device = costs.find_device(gpu)
        sizes, model = costs.read_base(base)
        tenants = [costs.read_tenant(folder, sizes, model) for folder in adapters_in(pool)]
        found = costs.predict(
            sizes, tenants, device, rows=batch, prefill_tokens=prefill_tokens, ranks=ranks, memory_gib=gpu_memory
        )
        if plot is not None:
            draw(found, plot)
    except Refusal as refusal:
        print_refusal(refusal, done="predicted", json=json)
        raise typer.Exit(1) from refusal
    except (costs.UnknownFigure, ImportError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except (OSError, ValueError, OverflowError) as error:
        raise typer.BadParameter(str(error)) from error
    if json:
        print_json({"predicted": True, **asdict(found), "figures": asdict(device)})
    else:
        _print_text(found)


def _print_text(found: "Prediction") -> None:
    pool = counted(found.tenants, "adapter")
    typer.echo(f"{pool} on {found.base}, {found.device}. Times are added to the base model's step.")
    steps = [(arm, kind, step) for arm in found.arms for kind, step in _steps(arm)]
    print_table(
        ("arm", "rank", "step", "rows", "ms, floor", "most of it", "launches"),
        [
            (a.name, str(a.rank or "own"), kind, str(s.rows), f"{s.total_ms:.3f}", s.dominant, f"{s.launches:,}")
            for a, kind, s in steps
        ],
    )
    _print_bytes("MB moved", {f"{arm.name}, {kind}": step.bytes for arm, kind, step in steps}, 1e6)
    _print_bytes("MiB held", {arm.name: arm.memory for arm in found.arms}, 2**20)
    if found.fits:
        print_table(
            ("KV cache, tokens", "GiB", *(f"adapters, {name}" for name in found.fits[0].tenants)),
            [
                (f"{fit.kv_tokens:,}", f"{fit.kv_bytes / 2**30:.1f}", *(f"{n:,}" for n in fit.tenants.values()))
                for fit in found.fits
            ],
        )
    for note in found.notes:
        typer.echo(note)


def _print_bytes(heading: str, rows: Mapping[str, Mapping[str, int]], unit: float) -> None:
    kinds = list(dict.fromkeys(kind for row in rows.values() for kind in row))
    cells = [(name, *(f"{row.get(k, 0) / unit:,.2f}" for k in kinds)) for name, row in rows.items()]
    print_table((heading, *kinds), cells)


def _steps(arm: "Arm") -> "Iterator[tuple[str, Step]]":
    yield "decode", arm.decode
    if arm.prefill is not None:
        yield "prefill", arm.prefill
