"""What admission knows of the base model: its linear projections, by name, in order, with their shapes."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

# transformers 5.19 model types whose MLP was read and is down_proj(act_fn(gate_proj(x)) * up_proj(x)).
GATED_MODEL_TYPES = frozenset(
    {
        "llama",
        "mistral",
        "ministral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "cohere",
        "cohere2",
        "granite",
        "helium",
        "olmo",
        "olmo2",
        "olmo3",
        "smollm3",
        "seed_oss",
        "stablelm",
        "exaone4",
    }
)
AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")


@dataclass(frozen=True, slots=True)
class Projection:
    """One `nn.Linear` of the base model (or a tied or untied output head).

    transposed: whether its weight is stored as [in, out], as in transformers' Conv1D.
    """

    in_features: int
    out_features: int
    has_bias: bool
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model as the PEFT library sees it.

    projections: module name to shape, in the order of `named_modules()` (VeRA's regeneration needs it).
    gated_up: down projection to the up projection whose output it multiplies into, for gated MLPs only:
    down(act(gate(x)) * up(x)). dtype: what the base weights are served in (VeRA's regenerated pair is
    rounded through it). output_head: the projection to the vocabulary, which "all-linear" leaves out.
    embeddings: the names of the embeddings with their shapes, [rows, width]; none of them can be served.
    num_parameters: elements of all weights, tied ones once. tied: parameter to the one of which it is another name.
    read_weight: the stored parameter of a name, None where it cannot be read; None where the config alone is known.
    """

    projections: Mapping[str, Projection]
    gated_up: Mapping[str, str]
    dtype: torch.dtype
    output_head: str | None = None
    embeddings: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    num_parameters: int = 0
    tied: Mapping[str, str] = field(default_factory=dict)
    read_weight: Callable[[str], Tensor | None] | None = field(default=None, compare=False, repr=False)

    def with_weights(self, read: Callable[[str], Tensor | None]) -> Self:
        """The same base model, with the weights to hold copies against; a tied one may be stored under either name."""

        def read_weight(name: str) -> Tensor | None:
            stored = read(name)
            return read(self.tied[name]) if stored is None and name in self.tied else stored

        return replace(self, read_weight=read_weight)

    @property
    def fingerprint(self) -> str:
        """sha256 of all that compiling depends on but for the dtype: names, shapes, biases, gated pairs.

        The output head is left out: its size follows the vocabulary, which may grow.
        """
        body = [(n, p.in_features, p.out_features, p.has_bias) for n, p in self.projections.items()]
        kept = [entry for entry in sorted(body) if entry[0] != self.output_head]
        return hashlib.sha256(json.dumps([kept, sorted(self.gated_up.items())]).encode()).hexdigest()

    @classmethod
    def from_config(cls, hf_config: Any, dtype: torch.dtype) -> Self:
        """Build the model of a transformers config on the meta device, without weights, and read its modules.

        Raises ValueError if transformers has no model class for the config, or cannot make the model.
        """
        try:
            with torch.device("meta"):
                model = _empty_model(copy.deepcopy(hf_config))
        except ValueError:
            raise
        except Exception as error:  # a config may ask a model for anything, as a division by its 0 heads
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"there is no model of this {type(hf_config).__name__}: {reason}") from error
        return cls.from_module(model, dtype, gated=hf_config.model_type in GATED_MODEL_TYPES)

    @classmethod
    def from_module(cls, model: nn.Module, dtype: torch.dtype = torch.float32, *, gated: bool | None = None) -> Self:
        """Read the modules of a model. gated: whether its MLPs are gated; by default, its model type decides."""
        if gated is None:
            gated = getattr(getattr(model, "config", None), "model_type", None) in GATED_MODEL_TYPES
        modules = dict(model.named_modules())
        projections = {name: p for name, module in modules.items() if (p := _projection(module)) is not None}
        return cls(
            projections=projections,
            gated_up=dict(_gated_pairs(projections)) if gated else {},
            dtype=dtype,
            output_head=_output_head(model),
            embeddings={
                name: (module.num_embeddings, module.embedding_dim)
                for name, module in modules.items()
                if isinstance(module, nn.Embedding)
            },
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            tied=_tied(model),
        )


def _empty_model(hf_config: Any) -> nn.Module:
    import transformers  # slow to import, and only this function needs it

    for name in AUTO_CLASSES:
        auto = getattr(transformers, name)
        if type(hf_config) in auto._model_mapping:
            model: nn.Module = auto.from_config(hf_config, attn_implementation="eager")
            return model
    raise ValueError(f"transformers {transformers.__version__} has no model for {type(hf_config).__name__}")


def _projection(module: nn.Module) -> Projection | None:
    if isinstance(module, nn.Linear):
        return Projection(module.in_features, module.out_features, module.bias is not None)
    if type(module).__name__ == "Conv1D":  # transformers' linear layer of GPT-2; its weight is [in, out]
        rows, columns = module.get_parameter("weight").shape
        return Projection(rows, columns, has_bias=True, transposed=True)
    return None


def _gated_pairs(projections: Mapping[str, Projection]) -> Iterator[tuple[str, str]]:
    for down in projections:
        mlp, _, leaf = down.rpartition(".")
        gate, up = f"{mlp}.gate_proj", f"{mlp}.up_proj"
        if leaf == "down_proj" and gate in projections and up in projections:
            yield down, up


def _tied(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: kept for name, parameter in named if (kept := first.setdefault(id(parameter), name)) != name}


def _output_head(model: nn.Module) -> str | None:
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return next((name for name, module in model.named_modules() if module is head), None) if head is not None else None
