"""What a user may set: `--additional-config '{"scute": {...}}'`."""

import os
import re
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from scute.admission.methods.oft import MAX_WIDTH
from scute.errors import Incompatible

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RepositoryName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")]
Commit = Annotated[str, Field(pattern="^[0-9a-f]{40}$")]


class Options(BaseModel):
    """Limits that vLLM has no flag for; everything else follows vLLM's own LoRA flags.

    adapter_memory_gib: device memory of a rank for the adapters of a batch. If not given, it is what `max_loras`
    adapters of one method need at the other limits, and without a `max_lora_rank` at least 1/64 of the engine's memory.
    rotation_width: widest block of an input transform R (OFT's `oft_block_size`); 0 refuses OFT, and (IA)3 on the
    inputs of a feed-forward that is not gated.
    shared_pairs: how many different pairs of shared factors (VeRA projections) may be resident; 0 refuses VeRA.
    shared_rank: largest rank of a shared pair.
    host_memory_gib: how much all admitted adapters may take in host memory, by size of their files; half of the
    machine's memory if not given. An adapter beyond it is refused: it would have to be read in the middle of a step.
    allowed_roots: folders, by their full paths. Adapters are read from under them, and from nowhere else.
    allowed_repositories: repositories of the Hugging Face hub, and the commit that each is read at. If either of the
    two is given, adapters come from what they name only, whichever call asks.
    allowed_names: a regular expression for the whole of a name that a request looks up in them.
    adapter_file_gib: how large the files of one adapter may be; checked before they are fetched or opened.
    metrics_adapters: how many adapters have labels of their own in the metrics; the others are summed under one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    adapter_memory_gib: float | None = Field(default=None, gt=0)
    rotation_width: int = Field(default=32, ge=0, le=MAX_WIDTH)
    shared_pairs: int = Field(default=4, ge=0)
    shared_rank: int = Field(default=256, ge=1)
    host_memory_gib: float | None = Field(default=None, ge=0)
    metrics_adapters: int = Field(default=100, ge=0)
    allowed_roots: tuple[str, ...] | None = None
    allowed_repositories: dict[RepositoryName, Commit] | None = None
    allowed_names: str | None = None
    adapter_file_gib: float | None = Field(default=None, gt=0)

    @field_validator("allowed_roots")
    @classmethod
    def _are_full_paths(cls, roots: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for root in roots or ():
            if not os.path.isabs(root) or "\0" in root:
                raise ValueError(f"{root!r} is not the full path of a folder")
        return roots

    @field_validator("allowed_names")
    @classmethod
    def _is_an_expression(cls, names: str | None) -> str | None:
        try:
            re.compile(names or "")
        except re.error as error:
            raise ValueError(f"{names!r} is no regular expression: {error}") from error
        return names

    @property
    def restricts_sources(self) -> bool:
        return self.allowed_roots is not None or self.allowed_repositories is not None

    @classmethod
    def read(cls, vllm_config: "VllmConfig") -> "Options":
        """Of an engine. Raises Incompatible as `parse` does."""
        return cls.parse(vllm_config.additional_config)

    @classmethod
    def parse(cls, additional: object) -> "Options":
        """Of vLLM's `additional_config`. Raises Incompatible, in one line, for an unknown or unparsable option."""
        given = additional.get("scute", {}) if isinstance(additional, dict) else {}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(["additional_config['scute']", *map(str, first["loc"])])
            known = ", ".join(cls.model_fields)
            raise Incompatible(f"{where} is not valid: {first['msg']}. The options are {known}.") from error
