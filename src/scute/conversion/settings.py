"""What a user decides about a conversion."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from scute.conversion.distillation import Training


class Method(StrEnum):
    """How a projection is approximated that has no exact LoRA of the rank (paper, section 6.2)."""

    SVD = "svd"
    ASVD = "asvd"
    DISTILL = "distill"


@dataclass(frozen=True, slots=True)
class Settings:
    """The choices of one conversion.

    rank: of the LoRA, at most. data: text to fit and measure on, of which `limit` sequences are used; asvd and
    distill need it. measured: whether error and effect are measured, for which the whole base model is loaded.
    device: where SVDs and forwards run. force: replace an adapter folder that is in the way.
    """

    rank: int
    method: Method = Method.SVD
    data: Path | None = None
    limit: int = 128
    training: Training = field(default_factory=Training)
    measured: bool = True
    device: str = "cpu"
    force: bool = False
