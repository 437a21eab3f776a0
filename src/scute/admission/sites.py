"""Tensor names to sites: `base_model.model.<module>.<suffix>`, one site for every adapted projection."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from scute.admission.base import BaseModel, Projection
from scute.admission.tensors import Tensors
from scute.errors import Code, Refusal

PREFIX = "base_model.model."
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "module")
EMBEDDING_SUFFIXES = (
    "lora_embedding_A",
    "lora_embedding_B",
    "oft_embedding_R.weight",
    "token_adapter.trainable_tokens_delta",
)


PACKED = {
    **dict.fromkeys(("qkv_proj", "c_attn", "query_key_value", "W_pack"), ("q_proj", "k_proj", "v_proj")),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Projections that some models hold as one, and what others hold in its place."""


@dataclass(frozen=True, slots=True)
class Site:
    """One adapted projection and its part of the file."""

    module: str
    projection: Projection
    tensors: Tensors

    def name(self, suffix: str) -> str:
        return f"{PREFIX}{self.module}.{suffix}"

    def has(self, suffix: str) -> bool:
        return self.name(suffix) in self.tensors

    def shape(self, suffix: str) -> tuple[int, ...]:
        return self.tensors.shape(self.name(suffix)) if self.has(suffix) else ()

    def take(self, suffix: str, *shape: int | str, reason: str = "") -> Tensor:
        """The tensor, of that shape; a string in the shape names a free dimension (at least 1).

        Refuses what `Tensors.take` does.
        """
        return self.tensors.take(self.name(suffix), *shape, reason=reason)

    def refuse(self, refusal: Refusal) -> None:
        """Raise or collect a refusal of the adapter."""
        self.tensors.reasons.add(refusal)


def find_sites(tensors: Tensors, suffixes: Iterable[str], shared: Iterable[str], base: BaseModel) -> dict[str, Site]:
    """The sites of a file, in the order of the base model's modules.

    suffixes: what a tensor of this method is called behind its module; shared: whole names that belong to no
    module. Names that fit neither are left in `tensors`, unless they are known to be wrong: refuses TENSOR_PREFIX,
    TENSOR_NO_MODULE and MODULE_UNSUPPORTED.
    """
    known, shared = tuple(suffixes), frozenset(shared)
    modules = {_module_or_refused(tensors, name, known, base) for name in tensors.names if name not in shared}
    return {m: Site(m, projection, tensors) for m, projection in base.projections.items() if m in modules}


def modules_in(tensors: Tensors, suffixes: tuple[str, ...]) -> set[str]:
    """The modules that the names of tensors have, whether or not there are such modules."""
    paths = (name.removeprefix(PREFIX) for name in tensors.names if name.startswith(PREFIX))
    return {module for path in paths if (module := _without_suffix(path, suffixes)) is not None}


def _module_or_refused(tensors: Tensors, name: str, suffixes: tuple[str, ...], base: BaseModel) -> str | None:
    try:
        return module_of(name, suffixes, base)
    except Refusal as refusal:
        tensors.reasons.add(refusal)
        tensors.discard(name)
        return None


def module_of(name: str, suffixes: tuple[str, ...], base: BaseModel | None) -> str | None:
    """The module that the tensor adapts; None for a bias or for a name that nobody knows.

    Without a base model the spelling alone is checked.
    """
    if name.endswith("dora_scale"):
        raise Refusal(
            Code.METHOD_UNSUPPORTED,
            f"{name} is the magnitude of DoRA as LyCORIS writes it, whose norms are taken the other way. Scute serves "
            "DoRA as PEFT writes it, with lora_magnitude_vector.",
        )
    if not name.startswith(PREFIX) or name.removeprefix(PREFIX).split(".")[0] in WRAPPERS:
        raise _wrong_spelling(name, _expected_spelling(name))
    path = name.removeprefix(PREFIX)
    _refuse_unsupported(name, path, base)
    module = _without_suffix(path, suffixes)
    if module is None:
        _refuse_adapter_name(name, path, suffixes)
        return None
    if base is not None and module not in base.projections:
        raise no_module(name, module, base)
    return module


def _without_suffix(path: str, suffixes: tuple[str, ...]) -> str | None:
    return next((path.removesuffix(f".{s}") for s in suffixes if path.endswith(f".{s}")), None)


def _refuse_unsupported(name: str, path: str, base: BaseModel | None) -> None:
    if path.endswith(EMBEDDING_SUFFIXES):
        what = "it adapts an embedding, and Scute serves linear projections only"
    elif "experts" in path.split("."):
        what = "it adapts an expert of a mixture-of-experts layer, which Scute does not serve"
    elif path.endswith(".base_layer.weight") and base is not None:
        what = "it is a copy of a base weight, which PEFT saves for the embedding and the output head alone"
    else:
        return
    raise Refusal(Code.MODULE_UNSUPPORTED, f"{name} is not supported: {what}.")


def _refuse_adapter_name(name: str, path: str, suffixes: tuple[str, ...]) -> None:
    """PEFT cuts the adapter's name out when it saves; a raw state dict still has it, as in `lora_A.default.weight`."""
    parts = path.split(".")
    for position in (-1, -2):
        shorter = ".".join(part for i, part in enumerate(parts, -len(parts)) if i != position)
        if _without_suffix(shorter, suffixes) is not None:
            raise _wrong_spelling(name, PREFIX + shorter)


def _expected_spelling(name: str) -> str:
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in (*WRAPPERS, "base_model"):
        parts = parts[2:] if parts[:2] == ["base_model", "model"] else parts[1:]
    return PREFIX + ".".join(parts)


def _wrong_spelling(name: str, expected: str) -> Refusal:
    return Refusal(
        Code.TENSOR_PREFIX,
        f"{name} is not spelled as PEFT saves it; expected {expected}. "
        "Save the adapter with PEFT's save_pretrained, not from a raw or wrapped state dict.",
    )


def no_module(name: str, module: str, base: BaseModel) -> Refusal:
    """The refusal of a tensor whose module the base model does not have, or has as an embedding."""
    if module in base.embeddings:
        return Refusal(Code.MODULE_UNSUPPORTED, f"{name} adapts the embedding {module}; Scute serves projections only.")
    hint = _packed_otherwise(module, base)
    if hint:
        return Refusal(Code.TENSOR_NO_MODULE, f"{name}: the base model has no linear projection {module}; {hint}.")
    nearest = difflib.get_close_matches(module, base.projections, n=3, cutoff=0.5)
    hint = f" Nearest: {', '.join(nearest)}." if nearest else ""
    return Refusal(
        Code.TENSOR_NO_MODULE,
        f"{name}: the base model has no linear projection {module}.{hint} Is this the adapter's base model?",
    )


def _packed_otherwise(module: str, base: BaseModel) -> str:
    """What the base model has in place of a projection that is packed, or of a part of one; empty for neither."""
    parent, _, leaf = module.rpartition(".")
    for packed, parts in PACKED.items():
        if leaf == packed and all(f"{parent}.{part}" in base.projections for part in parts):
            return (
                f"it has {', '.join(parts)} in its place, and no file says in which order {packed} holds their rows. "
                f"Split the adapter into these, or serve it on the base model that has {packed}"
            )
        if leaf in parts and f"{parent}.{packed}" in base.projections:
            return f"it has {packed} in place of {', '.join(parts)}. Serve it on the base model that has {leaf}"
    return ""
