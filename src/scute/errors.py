"""The two errors a user meets: an adapter that is refused, and an engine that does not fit."""

import reprlib
from enum import StrEnum
from typing import Any


class Code(StrEnum):
    """Why an adapter is refused; stable, so that clients may match on it."""

    # where it comes from
    SOURCE_NAME = "source.name"
    SOURCE_NOT_ALLOWED = "source.not_allowed"
    SOURCE_TOO_LARGE = "source.too_large"
    # the folder
    FOLDER_MISSING = "folder.missing"
    FOLDER_INCOMPLETE = "folder.incomplete"
    FOLDER_PICKLE = "folder.pickle"
    FOLDER_UNREADABLE = "folder.unreadable"
    # adapter_config.json
    CONFIG_INVALID = "config.invalid"
    CONFIG_UNKNOWN_FIELD = "config.unknown_field"
    CONFIG_UNSUPPORTED_FIELD = "config.unsupported_field"
    CONFIG_MISMATCH = "config.mismatch"
    METHOD_UNSUPPORTED = "method.unsupported"
    METHOD_OLD_FORMAT = "method.old_format"
    INIT_CHANGED_BASE = "init.changed_base"
    # adapter_model.safetensors
    TENSOR_PREFIX = "tensor.prefix"
    TENSOR_NO_MODULE = "tensor.no_module"
    TENSOR_MISSING = "tensor.missing"
    TENSOR_LEFT_OVER = "tensor.left_over"
    TENSOR_SHAPE = "tensor.shape"
    TENSOR_DTYPE = "tensor.dtype"
    TENSOR_NOT_FINITE = "tensor.not_finite"
    # manifest.json of a compiled folder
    COMPILED_VERSION = "compiled.version"
    COMPILED_MANIFEST = "compiled.manifest"
    COMPILED_HASH = "compiled.hash"
    COMPILED_BASE = "compiled.base"
    # several adapters, one after the other
    STACK_PATH = "stack.path"
    STACK_BIAS = "stack.bias"
    STACK_ROTATION = "stack.rotation"
    STACK_SHARED = "stack.shared"
    STACK_MAGNITUDE = "stack.magnitude"
    # the adapter against the engine
    MODULE_UNSUPPORTED = "module.unsupported"
    CAPACITY_RANK = "capacity.rank"
    CAPACITY_ROTATION = "capacity.rotation"
    CAPACITY_SHARED = "capacity.shared"
    CAPACITY_DEVICE = "capacity.device"
    CAPACITY_HOST = "capacity.host"
    CAPACITY_PINNED = "capacity.pinned"
    PEER_RANK_FAILED = "peer.failed"
    # conversion to LoRA
    CONVERSION_BIAS = "conversion.bias"
    CONVERSION_WEIGHT = "conversion.weight"


LONGEST = 1200
"""Characters of a refusal's sentence."""


class Refusal(ValueError):
    """An adapter that cannot be served exactly.

    `str()` is one sentence or two that say what is wrong, where, and what to do next; it starts with
    `[scute:<code>]` so that the code survives every process boundary as text.
    """

    def __init__(self, code: Code, sentence: str) -> None:
        self.code = code
        self.sentence = printable(sentence)
        super().__init__(f"[scute:{code}] {self.sentence}")

    def of(self, folder: str) -> "Refusal":
        """The same refusal where there are several folders."""
        return Refusal(self.code, f"{folder}: {self.sentence}")

    def __reduce__(self) -> tuple[type["Refusal"], tuple[Code, str]]:
        return Refusal, (self.code, self.sentence)


def printable(text: str) -> str:
    """One line of at most LONGEST characters that any encoding and any terminal takes: names come from files."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST * 2 // 3]} ... {text[-LONGEST // 3 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def shown(value: Any) -> str:
    """A value of a file in at most 60 characters, however deep or long it is."""
    text = _SHORT.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class Incompatible(RuntimeError):
    """This vLLM, or the way it was configured, is not one that Scute is known to serve exactly with."""
