"""How closely an engine follows the PEFT library: its error as a share of what the adapter does, and on what tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Agreement:
    """Mean absolute differences of log-probabilities, in nats per token (paper, section 6.2).

    effect: between the PEFT library with and without the adapter. error: between the engine and the PEFT
    library, both with the adapter.
    """

    effect: float
    error: float

    @property
    def ratio(self) -> float:
        """The error as a share of the effect."""
        return self.error / self.effect if self.effect else float("inf")


def random_prompts(vocabulary: int, count: int = 8, length: int = 32, seed: int = 0) -> list[list[int]]:
    """`count` sequences of `length` token ids, drawn evenly from the vocabulary; the same seed draws the same."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(vocabulary, (count, length), generator=generator).tolist()
    return prompts


def agreement(base: Sequence[Tensor], peft: Sequence[Tensor], engine: Sequence[Tensor]) -> Agreement:
    """Compare three runs over the same prompts; each holds one tensor [tokens - 1] per prompt."""
    return Agreement(effect=mean_difference(peft, base), error=mean_difference(engine, peft))


def mean_difference(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Mean |left - right| over all tokens of all prompts, in nats; a prompt counts by its length.

    Raises ValueError where the two runs differ in prompts or lengths, and where a value is not finite.
    """
    if [t.shape for t in left] != [t.shape for t in right]:
        raise ValueError("the two runs have different prompts")
    difference = (torch.cat(list(left)).double() - torch.cat(list(right)).double()).abs()
    if not difference.isfinite().all():
        raise ValueError("a log-probability is not finite")
    return float(difference.mean())
