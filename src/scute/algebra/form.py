"""The normal form: what one adapter does to one linear projection (paper, equation 1).

    y = ((x R) W) ⊙ s + b + Σ_k c_k (((x A_k) ⊙ d_k) B_k) ⊙ e_k

Row vectors throughout: x is [tokens, in], W is [in, out] (the transpose of `nn.Linear.weight`). A slot
that is None is the identity. Tensors keep the dtype of the checkpoint (float32 as a rule), on the CPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self

import torch
from torch import Tensor


class Owner(Enum):
    """Who may change a tensor: a fold may write into what the adapter owns and into nothing else."""

    ADAPTER = "adapter"
    SHARED = "shared"


@dataclass(frozen=True, slots=True, eq=False)
class SharedPair:
    """A frozen pair of factors that many adapters, layers and slices use in common (VeRA).

    a: [max_in, rank]; b: [rank, max_out]. A layer uses the leading rows of `a` and columns of `b`.
    key: digest of the values; equal keys mean the same pair. drawn_from: the key of the generator that the values were
    drawn from for the dtype of the base model, or None if they came with the adapter.
    """

    key: str
    a: Tensor
    b: Tensor
    drawn_from: int | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One low-rank term c ((x A) ⊙ d) B ⊙ e.

    a: [in, rank]; b: [rank, out]; c: scalar; d: [rank] or None; e: [out] or None. The vectors and c are
    the adapter's own; `a_owner` and `b_owner` say whose the factors are. `pair` is where shared factors
    come from: a and b are then views of its leading rows and columns.
    """

    a: Tensor
    b: Tensor
    c: float = 1.0
    d: Tensor | None = None
    e: Tensor | None = None
    a_owner: Owner = Owner.ADAPTER
    b_owner: Owner = Owner.ADAPTER
    pair: SharedPair | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The input transform R, block-diagonal and not necessarily orthogonal.

    blocks: [in / width, width, width]. Row vectors: x'[n, j] = Σ_i x[n, i] blocks[n, i, j] for block n.
    Width 1 is a diagonal R, as (IA)3 on a feed-forward layer has it.
    """

    blocks: Tensor

    @property
    def width(self) -> int:
        return self.blocks.shape[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """How the adapter's b follows from the base layer's own bias.

    b = (replaced if given else the base bias) ⊙ (s if `scaled`) ⊙ (factor if given) + shift

    replaced, shift, factor: [out] or None. (IA)3 scales the base bias; DoRA does not; `bias="all"` replaces
    it; `lora_bias` shifts it. Only a stack has a factor, where one member scales the bias and the other does not.
    """

    scaled: bool = False
    replaced: Tensor | None = None
    shift: Tensor | None = None
    factor: Tensor | None = None

    def on(self, device: torch.device) -> Self:
        """The same with its tensors there."""
        moved = [None if t is None else t.to(device) for t in (self.replaced, self.shift, self.factor)]
        return type(self)(self.scaled, *moved)

    def resolve(self, base_bias: Tensor | None, scale: Tensor | None) -> Tensor | None:
        """The slot b, [out] or None, of a layer whose own bias is `base_bias` ([out] or None).

        What is multiplied or added is float32 or wider by then.
        """
        bias = base_bias if self.replaced is None else self.replaced
        if bias is not None and self.scaled and scale is not None:
            bias = _wide(bias) * scale
        if bias is not None and self.factor is not None:
            bias = _wide(bias) * self.factor
        if self.shift is not None:
            bias = self.shift if bias is None else _wide(bias) + self.shift
        return bias


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """The normal form of one adapter on one projection.

    rotation: R or None; scale: s, [out] or None; bias: b as a function of the base bias; terms: the sum.
    magnitude: [out] or None, DoRA's learned column norms. It stands for s = e_k = magnitude / norms of the
    columns of W + Σ c A B, which only a holder of W can compute (`resolve_magnitude`); a member that has it
    has neither scale nor rotation nor any e.
    """

    rotation: Rotation | None = None
    scale: Tensor | None = None
    bias: Bias = field(default_factory=Bias)
    terms: tuple[Term, ...] = ()
    magnitude: Tensor | None = None

    def __post_init__(self) -> None:
        if self.magnitude is not None and (
            self.scale is not None or self.rotation is not None or any(t.e is not None for t in self.terms)
        ):
            raise ValueError("a member with a magnitude derives s and e from it and has no rotation")

    @property
    def rank(self) -> int:
        """Total rank of the terms whose factors the adapter owns."""
        return sum(t.rank for t in self.terms if t.pair is None)

    def resolve_magnitude(self, column_norms: Tensor) -> Self:
        """Put s = e = magnitude / column_norms ([out], of W + Σ c A B) in place of the magnitude."""
        if self.magnitude is None:
            return self
        scale = self.magnitude.to(column_norms) / column_norms
        terms = tuple(replace(t, e=scale) for t in self.terms)
        return type(self)(scale=scale, bias=self.bias, terms=terms)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterForm:
    """A whole adapter in normal form.

    method: the name a user reads, as "DoRA". members: projection name in the base model, as
    "model.layers.0.self_attn.q_proj", to its member.
    """

    method: str
    members: Mapping[str, Member]

    @property
    def max_rank(self) -> int:
        return max((m.rank for m in self.members.values()), default=0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def column_norms(weight: Tensor, terms: tuple[Term, ...]) -> Tensor:
    """Norm of every column of W + Σ c A B, in float64, where the weight is; weight: [in, out], result: [out]."""
    total = weight.to(torch.float64)
    for term in terms:
        total = total + term.c * (term.a.to(total) @ term.b.to(total))
    norms: Tensor = torch.linalg.vector_norm(total, dim=0)
    return norms
