"""What a user may set: `--additional-config '{"scute": {...}}'`."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scute.admission.methods.oft import MAX_WIDTH
from scute.errors import Incompatible

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Options(BaseModel):
    """Limits that vLLM has no flag for; everything else follows vLLM's own LoRA flags.

    adapter_memory_gib: device memory of a rank for the adapters of a batch. If not given, it is what `max_loras`
    adapters of one method need at the other limits.
    rotation_width: widest block of an input transform R (OFT's `oft_block_size`); 0 refuses OFT, and (IA)3 on the
    inputs of a feed-forward that is not gated.
    shared_pairs: how many different pairs of shared factors (VeRA projections) may be resident; 0 refuses VeRA.
    shared_rank: largest rank of a shared pair.
    host_memory_gib: how much all admitted adapters may take in host memory, by size of their files; half of the
    machine's memory if not given. An adapter beyond it is refused: it would have to be read in the middle of a step.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    adapter_memory_gib: float | None = Field(default=None, gt=0)
    rotation_width: int = Field(default=32, ge=0, le=MAX_WIDTH)
    shared_pairs: int = Field(default=4, ge=0)
    shared_rank: int = Field(default=256, ge=1)
    host_memory_gib: float | None = Field(default=None, ge=0)

    @classmethod
    def read(cls, vllm_config: "VllmConfig") -> "Options":
        """Raises Incompatible, in one line, for an unknown or unparsable option."""
        additional = vllm_config.additional_config
        given = additional.get("scute", {}) if isinstance(additional, dict) else {}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(["additional_config['scute']", *map(str, first["loc"])])
            known = ", ".join(cls.model_fields)
            raise Incompatible(f"{where} is not valid: {first['msg']}. The options are {known}.") from error
