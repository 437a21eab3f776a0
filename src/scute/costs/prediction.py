"""What a pool of adapters costs in time and memory on a device, against its conversions to LoRA."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scute.costs.arms import Arm, Asked, scute_arm, stock_arm
from scute.costs.base import Base
from scute.costs.device import Device
from scute.costs.tenant import Tenant

GPU_SHARE = 0.92
"""vLLM 0.33's default of `--gpu-memory-utilization`."""
KV_TOKENS = (2**13, 2**15, 2**17, 2**19)


@dataclass(frozen=True, slots=True)
class Fit:
    """kv_bytes: of a KV cache of so many tokens. tenants: by arm, how many adapters like the pool's mean fit beside."""

    kv_tokens: int
    kv_bytes: int
    tenants: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Prediction:
    """weight_bytes: of the base model. memory_bytes: of the device, None where it is not known, and fits is empty then.

    arms: Scute first, then one a rank of conversion. notes: sentences for a reader, on what stands in for what is not
    known, and on why nothing fits.
    """

    base: str
    device: str
    tenants: int
    weight_bytes: int
    memory_bytes: int | None
    arms: tuple[Arm, ...]
    fits: tuple[Fit, ...]
    notes: tuple[str, ...]


def predict(
    base: Base,
    pool: Sequence[Tenant],
    device: Device,
    *,
    rows: int,
    prefill_tokens: int = 0,
    ranks: Sequence[int] = (64,),
    memory_gib: float | None = None,
) -> Prediction:
    """The byte model on a pool whose adapters share the rows of a step evenly.

    rows: of a decode step; prefill_tokens: rows of a prefill step, 0 for none. ranks: of the conversions. memory_gib:
    of the device, by default what is known of it. Raises ValueError for an empty pool or batch and for a rank that vLLM
    does not serve, UnknownFigure for a device whose constants are not known.
    """
    if not pool or rows < 1 or prefill_tokens < 0 or any(rank < 1 for rank in ranks):
        raise ValueError("a prediction needs an adapter, a row, and ranks of at least 1")
    asked = Asked(base, device, rows, prefill_tokens)
    arms = (scute_arm(pool, asked), *(stock_arm(pool, asked, rank) for rank in dict.fromkeys(ranks)))
    gib = device.memory_gib if memory_gib is None else memory_gib
    memory = None if gib is None else int(gib * 2**30)
    fits = () if memory is None else tuple(_fits(base, arms, int(memory * GPU_SHARE)))
    notes = tuple(_notes(base, device, memory, fits))
    return Prediction(base.name, device.name, len(pool), base.weight_bytes, memory, arms, fits, notes)


def _notes(base: Base, device: Device, memory: int | None, fits: Sequence[Fit]) -> Iterator[str]:
    yield "Times are a floor: bytes and launches alone, and no time in which kernels wait."
    if device.l2_bandwidth_gb_s is None or device.l2_mib is None:
        yield (
            f"The bandwidth within L2 of {device.name} is not known, so that of its memory stands in for it: x and y "
            "may take less."
        )
    if memory is None:
        yield f"The memory of {device.name} is not known, so nothing is said of what fits; give --gpu-memory."
    elif not fits:
        yield (
            f"Nothing fits: the weights take {base.weight_bytes / 2**30:.1f} GiB, and {GPU_SHARE} of the GPU's "
            f"{memory / 2**30:.1f} GiB does not hold them and a KV cache of {KV_TOKENS[0]:,} tokens."
        )


def _fits(base: Base, arms: Sequence[Arm], memory: int) -> Iterator[Fit]:
    """What activations and CUDA graphs take is not known here and not taken off."""
    for tokens in KV_TOKENS:
        left = memory - base.weight_bytes - tokens * base.kv_token_bytes
        if left >= 0:
            held = {arm.name: max(0, left - arm.once_bytes) // max(1, arm.adapter_bytes) for arm in arms}
            yield Fit(tokens, tokens * base.kv_token_bytes, held)
