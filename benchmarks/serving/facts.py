"""What every row says of its run, its engine, its tenants and its load."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rows

from serving import engines, loads
from serving.plans import Arm, Cell
from serving.pools import POOLS, kind_of
from serving.session import Session


def described(session: Session, run: str, cell: Cell, arm: Arm) -> dict[str, Any]:
    """The fields of `rows.Served` but for the correctness; the stream is that of a timed round."""
    name, variant = arm
    prompt_tokens, output_tokens = loads.LENGTHS[cell.load.kind]
    engine = session.engines.get(name)
    return {
        "run": run,
        "environment": session.environment,
        "model": session.settings.model,
        "layers": session.settings.layers,
        "dtype": session.settings.dtype,
        "engine": engine.record if engine else rows.Engine(name=name, scute=engines.ENGINES[name].scute),
        "tenants": _tenants(cell.pool, variant, session.folders),
        "stream": rows.Stream(
            kind=cell.load.kind,
            rate=cell.load.rate,
            popularity=cell.load.popularity,
            requests=session.requests(cell),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
        ),
    }


def _tenants(pool: str, variant: str, folders: Mapping[str, Path]) -> rows.Tenants:
    """Ranks and targets are read from the folders that the engines read."""
    names = POOLS[pool].distinct(variant)
    ranks, targets = {}, {}
    for name in names:
        if name in folders and kind_of(name) not in ranks:
            config = json.loads((folders[name] / "adapter_config.json").read_text())
            ranks[kind_of(name)] = config["r"] if config["peft_type"] == "LORA" else 0
            targets[kind_of(name)] = sorted(config["target_modules"])
    kinds = dict(Counter(map(kind_of, names)))
    return rows.Tenants(pool=pool, variant=variant, count=POOLS[pool].size, kinds=kinds, ranks=ranks, targets=targets)
