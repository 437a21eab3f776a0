"""Scores a served mixed batch against the PEFT library, adapter by adapter."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from scute.agreement import Agreement, agreement, mean_difference
from scute.engine.offline import Row
from scute.testing.oracle import Oracle


def score(
    oracle: Oracle, rows: Sequence[tuple[str | None, int]], served: Sequence[Row], folders: Mapping[str, str]
) -> dict[str, Agreement]:
    """Effect and error of every adapter in the batch, over prompt and decoded tokens alike."""
    scores = {}
    for name, folder in folders.items():
        mine = _of(name, rows, served)
        sequences = [row["tokens"] for row in mine]
        engine = [torch.tensor(row["logprobs"]) for row in mine]
        scores[name] = agreement(oracle.logprobs(sequences), oracle.logprobs(sequences, Path(folder)), engine)
    return scores


def base_error(oracle: Oracle, rows: Sequence[tuple[str | None, int]], served: Sequence[Row]) -> float:
    """Mean difference of the base rows to the base model in float32, in nats a token."""
    mine = _of(None, rows, served)
    return mean_difference(
        [torch.tensor(row["logprobs"]) for row in mine], oracle.logprobs([row["tokens"] for row in mine])
    )


def _of(name: str | None, rows: Sequence[tuple[str | None, int]], served: Sequence[Row]) -> list[Row]:
    return [row for (adapter, _), row in zip(rows, served, strict=True) if adapter == name]
