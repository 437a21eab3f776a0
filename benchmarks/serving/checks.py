"""Whether what an engine serves is what the PEFT library computes."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rows import Correctness, Deviation

LIMIT = 0.02  # error as a share of the adapter's effect; the paper's engine stays below 0.016 in fp16
BASE_LIMIT = 0.02  # nats a token
PROMPTS, PROMPT_TOKENS, DECODED_TOKENS = 2, 12, 8

Row = tuple[str | None, list[int], list[int]]


def rows(vocabulary: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what is decoded after each: one token again and again, so that it is known in advance."""
    generator = np.random.default_rng(0)
    prompts = generator.integers(3, vocabulary, (PROMPTS, PROMPT_TOKENS)).tolist()
    decoded = generator.integers(3, vocabulary, PROMPTS).tolist()
    return [(prompt, [token] * DECODED_TOKENS) for prompt, token in zip(prompts, decoded, strict=True)]


def mixed_batch(tenants: Sequence[str], vocabulary: int) -> list[Row]:
    """Every row under every tenant and under the base model, in turn: (tenant, prompt, what is decoded)."""
    return [(tenant, *row) for row in rows(vocabulary) for tenant in (None, *tenants)]


def correctness(
    batch: Sequence[Row],
    served: Sequence[Sequence[float]],
    peft: Mapping[str, NDArray[np.float32]],
    base: str,
) -> Correctness:
    """served: of as many last tokens of each row as the engine scored. Raises ValueError for one that is not finite."""
    scored = min(map(len, served))

    def engine(tenant: str | None) -> NDArray[np.float64]:
        return np.asarray([values for row, values in zip(batch, served, strict=True) if row[0] == tenant])

    def reference(name: str) -> NDArray[np.float32]:
        return peft[name][:, -scored:]

    def deviation(name: str) -> Deviation:
        effect = _difference(reference(name), reference(base))
        return Deviation(effect=effect, error=_difference(engine(name), reference(name)))

    return Correctness(
        tenants={name: deviation(name) for name in dict.fromkeys(row[0] for row in batch if row[0] is not None)},
        base_error=_difference(engine(None), reference(base)),
        tokens=scored * len(batch),
        limit=LIMIT,
        base_limit=BASE_LIMIT,
    )


def _difference(left: ArrayLike, right: ArrayLike) -> float:
    difference = np.abs(np.subtract(left, right, dtype=np.float64))
    if not np.isfinite(difference).all():
        raise ValueError("a log-probability is not finite")
    return float(difference.mean())
