"""VeRA (https://arxiv.org/abs/2310.11454).

PEFT 0.21.2: `peft.tuners.vera.layer.Linear`, `peft.tuners.vera.model._kaiming_init`.

    y = x W + b + (((x A) ⊙ d) B) ⊙ e

vera_lambda_d [r] is d and vera_lambda_b [out] is e. base_model.vera_A [r, max in] and base_model.vera_B
[max out, r] are A and B transposed, shared by all modules; a module uses their leading columns and rows. With
save_projection = false they are not in the file and are generated anew from projection_prng_key. There is no alpha.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from scute.admission.base import BaseModel
from scute.admission.biases import take_base_bias
from scute.admission.config import AdapterConfig
from scute.admission.memory import check_size
from scute.admission.methods.method import Method
from scute.admission.sites import Site
from scute.admission.tensors import Tensors
from scute.algebra.form import Bias, Member, Owner, SharedPair, Term

A_NAME, B_NAME = "base_model.vera_A", "base_model.vera_B"


class VeraConfig(AdapterConfig):
    """The fields of VeRA."""

    absent: ClassVar[frozenset[str]] = frozenset({"exclude_modules"})
    inert: ClassVar[frozenset[str]] = AdapterConfig.inert | {"vera_dropout", "d_initial", "init_weights"}

    r: PositiveInt
    save_projection: bool
    projection_prng_key: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    bias: Literal["none", "all", "vera_only"] = "none"


def build(config: VeraConfig, sites: Mapping[str, Site], base: BaseModel, tensors: Tensors) -> dict[str, Member]:
    vectors = {module: _take_vectors(config, site) for module, site in sites.items()}  # before r sizes anything
    projections = [site.projection for site in sites.values()]
    shape_a = (config.r, max(p.in_features for p in projections))
    shape_b = (max(p.out_features for p in projections), config.r)
    if config.save_projection:
        pair = pair_of(*_saved(tensors, shape_a, shape_b))
    elif tensors.has_values:
        pair = drawn_pair(config.projection_prng_key, shape_a, shape_b, base.dtype)
    else:
        pair = pair_of(torch.empty(shape_a, device="meta"), torch.empty(shape_b, device="meta"))
    return {module: _member(config, site, pair, *vectors[module]) for module, site in sites.items()}


def _take_vectors(config: VeraConfig, site: Site) -> tuple[Tensor, Tensor]:
    return site.take("vera_lambda_d", config.r), site.take("vera_lambda_b", site.projection.out_features)


def _member(config: VeraConfig, site: Site, pair: SharedPair, d: Tensor, e: Tensor) -> Member:
    projection = site.projection
    term = Term(
        a=pair.a[: projection.in_features],
        b=pair.b[:, : projection.out_features],
        d=d,
        e=e,
        a_owner=Owner.SHARED,
        b_owner=Owner.SHARED,
        pair=pair,
    )
    return Member(bias=Bias(replaced=take_base_bias(site, config.bias)), terms=(term,))


def _saved(tensors: Tensors, shape_a: tuple[int, int], shape_b: tuple[int, int]) -> tuple[Tensor, Tensor]:
    reason = "The config has save_projection = true."
    return tensors.take(A_NAME, *shape_a, reason=reason), tensors.take(B_NAME, *shape_b, reason=reason)


def drawn_pair(key: int, shape_a: tuple[int, int], shape_b: tuple[int, int], base_dtype: torch.dtype) -> SharedPair:
    """The pair as PEFT draws it: A first, then B, in float32 on the CPU; then rounded through the base's dtype.

    shape_a: (rank, in) and shape_b: (out, rank), of the widest projections. Refuses CAPACITY_HOST.
    """
    check_size("the shared pair that projection_prng_key draws", 4 * (math.prod(shape_a) + math.prod(shape_b)))
    generator = torch.Generator(device="cpu").manual_seed(key)
    a, b = _kaiming(shape_a, generator), _kaiming(shape_b, generator)
    if base_dtype in (torch.float16, torch.bfloat16):
        a, b = a.to(base_dtype).float(), b.to(base_dtype).float()
    return replace(pair_of(a, b), drawn_from=key)


def _kaiming(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    # The order of these operations is PEFT's: the bound has to agree in its last bit.
    bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(shape[1]))
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)


def pair_of(a: Tensor, b: Tensor) -> SharedPair:
    """The pair of A [rank, in] and B [out, rank], as files have them; without values its key is empty."""
    if a.is_meta or b.is_meta:
        return SharedPair("", a.T, b.T)
    digest = hashlib.sha256()
    for factor in (a, b):
        values = factor.to(torch.promote_types(factor.dtype, torch.float32)).contiguous()
        digest.update(f"{values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.numpy().data)
    return SharedPair(digest.hexdigest(), a.T.contiguous(), b.T.contiguous())


METHOD = Method(
    name="VeRA",
    peft_type="VERA",
    config=VeraConfig,
    suffixes=("vera_lambda_d", "vera_lambda_b"),
    build=build,
    shared=(A_NAME, B_NAME),
)
