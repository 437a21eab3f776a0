"""manifest.json of a compiled folder: what the tensors beside it are, and where they came from."""

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from scute.admission import strict_json
from scute.admission.tensors import CONFIG_FILE, TENSOR_FILE
from scute.errors import Code, Refusal

MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "members.safetensors"
DIGEST = "sha256"
"""The field that has the digest of all others."""
FORMAT: Final = 1
"""Raised when a reader of the last format would read a folder wrongly."""

Slot = Literal["R", "s", "magnitude", "b.replaced", "b.shift", "b.factor"]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Entry(BaseModel):
    """Any object of the manifest: no field may be missing, unknown, or of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TermEntry(Entry):
    """A term of the sum. shared: its factors are those of the pair; vectors: which of d and e it has."""

    c: float
    rank: PositiveInt
    shared: bool
    vectors: list[Literal["d", "e"]]


class MemberEntry(Entry):
    """One projection. slots: those that it has; block_width: of R, 0 without one; scales_bias: whether s scales b."""

    slots: list[Slot]
    block_width: Annotated[int, Field(ge=0)]
    scales_bias: bool
    terms: list[TermEntry]

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if ("R" in self.slots) != (self.block_width > 0):
            raise ValueError("block_width is 0 without R, and the width of its blocks with it")
        resolved = "s" in self.slots or "R" in self.slots or any("e" in term.vectors for term in self.terms)
        if "magnitude" in self.slots and resolved:
            raise ValueError("a member with a magnitude has neither s, R nor e")
        if sum(term.shared for term in self.terms) > 1:
            raise ValueError("a member has at most one term on the pair")
        return self


class PairEntry(Entry):
    """The shared factors: A [rank, inputs] and B [outputs, rank]. drawn_from: the key that they are drawn from anew."""

    rank: PositiveInt
    inputs: PositiveInt
    outputs: PositiveInt
    drawn_from: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None


class SourceEntry(Entry):
    """A folder that was compiled. sha256: digest of each of its files, by name."""

    folder: str
    peft_version: str | None
    sha256: dict[str, Digest]


class BaseEntry(Entry):
    """The base model: name of its folder; dtype that it was compiled for; digest of its projections."""

    folder: str | None
    dtype: str
    projections: Digest


class WeightsEntry(Entry):
    sha256: Digest


class Manifest(Entry):
    """The whole file but for its digest. method: ASCII; source: a list for a stack, null where there was no folder."""

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]  # a Literal would take true for 1
    scute: str
    method: Annotated[str, Field(pattern="^[ -~]{1,64}$")]
    source: SourceEntry | list[SourceEntry] | None
    base: BaseEntry
    weights: WeightsEntry
    pair: PairEntry | None
    members: dict[str, MemberEntry]

    @model_validator(mode="after")
    def _agree(self) -> Self:
        terms = [term for member in self.members.values() for term in member.terms if term.shared]
        if (self.pair is not None) != bool(terms):
            raise ValueError("there is a pair if and only if a term is shared")
        if self.pair is not None and any(term.rank != self.pair.rank for term in terms):
            raise ValueError("shared terms have the rank of the pair")
        if self.pair is not None and self.pair.drawn_from is not None and any("d" not in t.vectors for t in terms):
            raise ValueError("shared terms have a d where the pair is drawn: it proves the rank")
        return self

    def write(self, folder: Path) -> None:
        content = self.model_dump()
        text = json.dumps(content | {DIGEST: content_digest(content)}, indent=1, ensure_ascii=False, allow_nan=False)
        (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def content_digest(content: dict[str, Any]) -> str:
    """sha256 of a manifest without its digest, however it is spaced and ordered."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Refuses FOLDER_UNREADABLE, COMPILED_VERSION, COMPILED_MANIFEST and COMPILED_HASH; raises OSError."""
    if not (folder / MANIFEST_FILE).is_file():  # a pipe would be waited for
        raise Refusal(Code.FOLDER_UNREADABLE, f"{MANIFEST_FILE} is not a file.")
    try:
        raw: Any = strict_json.read(folder / MANIFEST_FILE)
    except (ValueError, RecursionError) as error:
        raise Refusal(Code.FOLDER_UNREADABLE, f"{MANIFEST_FILE} is not readable as JSON: {error}.") from error
    version = raw.get("format") if isinstance(raw, dict) else None
    if isinstance(version, int) and not isinstance(version, bool) and version != FORMAT:
        raise Refusal(
            Code.COMPILED_VERSION,
            f"{MANIFEST_FILE}: format {version} is not read by this Scute, which reads format {FORMAT}. Compile the "
            "adapter again with this Scute, or serve it with the one that wrote it.",
        )
    told = raw.pop(DIGEST, None) if isinstance(raw, dict) else None
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise Refusal(
            Code.COMPILED_MANIFEST,
            f"{MANIFEST_FILE}: {where}: {first['msg']}. Compile the adapter again.",
        ) from error
    if told != content_digest(raw):
        raise Refusal(
            Code.COMPILED_HASH,
            f"{MANIFEST_FILE} is not what its own {DIGEST} was taken of: it was edited after it was "
            "written. Copy the folder again, or compile the adapter again.",
        )
    return manifest


def is_compiled(folder: Path) -> bool:
    """Whether the folder is a compiled one; a PEFT folder may have a manifest.json of another kind beside its files."""
    return os.path.exists(folder / MANIFEST_FILE) and not os.path.exists(folder / CONFIG_FILE)  # never raises


def tensor_file(folder: Path) -> Path:
    """The file of an adapter folder that has its tensors."""
    return folder / (WEIGHTS_FILE if is_compiled(folder) else TENSOR_FILE)
