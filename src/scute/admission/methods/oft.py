"""OFT (https://arxiv.org/abs/2306.07280) and constrained OFT, in the file format of PEFT 0.16 and later.

PEFT 0.21.2: `peft.tuners.oft.layer.OFTRotationModule`; 0.17.1 for the older series.

    y = (x R) W + b,  R = blockdiag(R_i)
    R_i = (I - Q_i) (I + Q_i)^-1                        use_cayley_neumann = false
    R_i = I + 2 Q_i + 2 Q_i^2 + ... + Q_i^(k-1)         k = num_cayley_neumann_terms; tends to the transpose

oft_R.weight [in / width, width (width - 1) / 2], or one row with block_share: the upper triangles, row by row, of
the skew-symmetric Q_i. Before PEFT 0.18 the last power of the series counted twice as well; shapes and names are
the same, so peft_version in the config decides.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from packaging.version import InvalidVersion, Version
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from scute.admission.base import BaseModel
from scute.admission.biases import take_base_bias
from scute.admission.config import AdapterConfig
from scute.admission.methods.method import Method, RawConfig
from scute.admission.sites import Site
from scute.admission.tensors import CONFIG_FILE, TENSOR_FILE, Tensors
from scute.algebra.form import Bias, Member, Rotation
from scute.errors import Code, Refusal, shown

WEIGHT = "oft_R.weight"
NEW_SERIES = Version("0.18.0")
MAX_WIDTH = 128
"""Widest block of R that any engine can be given room for."""


class OftConfig(AdapterConfig):
    """The fields of OFT. Either r, the number of blocks, is 0, or oft_block_size is."""

    inert: ClassVar[frozenset[str]] = (AdapterConfig.inert - {"peft_version"}) | {"module_dropout", "init_weights"}

    r: Annotated[int, Field(ge=0)] = 0
    oft_block_size: Annotated[int, Field(ge=0)]
    use_cayley_neumann: bool
    num_cayley_neumann_terms: Annotated[int, Field(ge=1, le=1000)]
    coft: bool
    eps: Annotated[float, Field(ge=0)]
    block_share: bool
    bias: Literal["none", "all", "oft_only"] = "none"
    peft_version: str | None = None

    @field_validator("oft_block_size")
    @classmethod
    def _one_of_two(cls, value: int, info: ValidationInfo) -> int:
        if "r" in info.data and (value == 0) == (info.data["r"] == 0):
            raise ValueError("exactly one of r and oft_block_size is 0; PEFT does not load it otherwise")
        return value


def check_format(raw: RawConfig, tensors: Tensors) -> None:
    """Refuse METHOD_OLD_FORMAT for the three formats before PEFT 0.16, which rotate something else."""
    old = next((name for name in tensors.names if name.endswith(".oft_r") or ".oft_r." in name), None)
    missing = next((field for field in ("oft_block_size", "use_cayley_neumann") if field not in raw), None)
    if old is not None or missing is not None:
        sign = f"{TENSOR_FILE} has {old}" if old is not None else f"{CONFIG_FILE} has no field {missing}"
        raise Refusal(
            Code.METHOD_OLD_FORMAT,
            f"{sign}, so a PEFT before 0.16 wrote this OFT adapter. Its rotation means something else; retrain it.",
        )


def build(config: OftConfig, sites: Mapping[str, Site], _: BaseModel, __: Tensors) -> dict[str, Member]:
    last_twice = not _is_new_series(config.peft_version)
    return {module: _member(config, site, last_twice) for module, site in sites.items()}


def _member(config: OftConfig, site: Site, last_twice: bool) -> Member:
    packed, width = _take_packed(config, site)
    count = site.projection.in_features // width
    bias = Bias(replaced=take_base_bias(site, config.bias))
    wide = torch.promote_types(packed.dtype, torch.float32)
    if packed.is_meta:
        return Member(rotation=Rotation(torch.empty(count, width, width, dtype=wide, device="meta")), bias=bias)
    skew = _skew_symmetric(packed.double(), width)
    if config.coft:
        skew = _constrain(skew, config.eps)
    if config.use_cayley_neumann:
        blocks = neumann(skew, config.num_cayley_neumann_terms, last_twice=last_twice)
    else:
        blocks = _cayley_of(site, skew)
    return Member(rotation=Rotation(blocks.expand(count, width, width).to(wide).contiguous()), bias=bias)


def _take_packed(config: OftConfig, site: Site) -> tuple[Tensor, int]:
    inputs = site.projection.in_features
    width = block_width(config.r, config.oft_block_size, inputs)
    if width > MAX_WIDTH:
        wide = f"{site.name(WEIGHT)} has blocks of {width}; at most {MAX_WIDTH} can be served."
        site.refuse(Refusal(Code.CAPACITY_ROTATION, wide))
    blocks = 1 if config.block_share else inputs // width
    reason = f"the config says blocks of {width} for {inputs} inputs"
    return site.take(WEIGHT, blocks, width * (width - 1) // 2, reason=reason), width


def block_width(blocks: int, width: int, inputs: int) -> int:
    """The width of a block of R: the one that is given, or of so many blocks, made to divide the inputs as in PEFT."""
    return _divisor(width, inputs) if width else inputs // _divisor(blocks, inputs)


def _divisor(near: int, number: int) -> int:
    """`OFTLayer.adjust_oft_parameters`: the nearest divisor, and the smaller of two that are as near."""
    if near >= number:
        return number
    lower = next(d for d in range(near, 0, -1) if number % d == 0)
    higher = next(d for d in range(near, number + 1) if number % d == 0)
    return lower if near - lower <= higher - near else higher


def _skew_symmetric(packed: Tensor, width: int) -> Tensor:
    row, column = torch.triu_indices(width, width, 1)
    upper = packed.new_zeros(packed.shape[0], width, width)
    upper[:, row, column] = packed
    return upper - upper.mT


def _constrain(skew: Tensor, eps: float) -> Tensor:
    """Pull every block back to the norm eps / sqrt(blocks), as PEFT does in each forward; it rounds that to float32."""
    limit = eps / torch.sqrt(torch.tensor(float(skew.shape[0]), dtype=torch.float32))
    norm = torch.linalg.vector_norm(skew, dim=(1, 2), keepdim=True)
    return torch.where(norm <= limit, skew, limit.double() * (skew / norm))


def _cayley_of(site: Site, skew: Tensor) -> Tensor:
    try:
        return cayley(skew)
    except RuntimeError as error:  # torch.linalg.LinAlgError
        raise Refusal(
            Code.TENSOR_NOT_FINITE, f"{site.name(WEIGHT)} is too large for its Cayley transform to exist: {error}."
        ) from error


def cayley(skew: Tensor) -> Tensor:
    """(I - Q) (I + Q)^-1, [blocks, width, width]."""
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype)
    solved: Tensor = torch.linalg.solve(identity + skew, identity - skew, left=False)
    return solved


def neumann(skew: Tensor, terms: int, *, last_twice: bool) -> Tensor:
    """I + 2 Q + ... + 2 Q^(k-2) + Q^(k-1) for k >= 4 terms; the last factor is 2 if `last_twice`.

    Three terms give the same as four in PEFT 0.18 and later, two give I + 2 Q, and one gives I.
    """
    highest = 3 if terms == 3 and not last_twice else terms - 1
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype).expand_as(skew)
    result, power = identity, identity
    for exponent in range(1, highest + 1):
        power = power @ skew
        is_single = exponent == highest > 1 and not last_twice
        result = result + (power if is_single else 2 * power)
    return result


def _is_new_series(peft_version: str | None) -> bool:
    """PEFT writes its version into the config since 0.18; a development version has its commit after an @."""
    if peft_version is None:
        return False
    try:
        return Version(peft_version.partition("@")[0]) >= NEW_SERIES
    except InvalidVersion as error:
        found = f"{CONFIG_FILE}: field peft_version: found {shown(peft_version)}; expected a version, as '0.21.2'."
        raise Refusal(Code.CONFIG_INVALID, found) from error


METHOD = Method(
    name="OFT",
    peft_type="OFT",
    config=OftConfig,
    suffixes=(WEIGHT,),
    build=build,
    check=check_format,
)
