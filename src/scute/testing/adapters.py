"""Adapters with amplified vectors, written by the PEFT library.

PEFT starts (IA)3, VeRA and OFT at or near the identity, and training moves them little: a slot that is dropped
or applied twice would not show. These recipes draw every vector far enough from the identity that it does
(paper, appendix E, "Amplified adapters").
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, OFTConfig, PeftConfig, VeraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from scute.testing.oracle import load_base

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One adapter to write: its method as users name it, PEFT's configuration class, and its options.

    strength: multiplies how far the vectors are drawn from the identity; 1 is the paper's amplitude.
    """

    method: str
    config: type[PeftConfig]
    seed: int
    targets: tuple[str, ...] = ALL_LINEAR
    options: Mapping[str, Any] = field(default_factory=dict)
    strength: float = 1.0


AMPLIFIED: Mapping[str, Recipe] = {
    "lora-r8": Recipe("LoRA", LoraConfig, 1, ALL_LINEAR, {"r": 8, "lora_alpha": 32}, 3),
    "lora-r3": Recipe("LoRA", LoraConfig, 2, ("q_proj", "v_proj", "down_proj"), {"r": 3, "lora_alpha": 24}, 5),
    "rslora-r16": Recipe("LoRA", LoraConfig, 3, ALL_LINEAR, {"r": 16, "lora_alpha": 16, "use_rslora": True}, 2),
    "adalora": Recipe("AdaLoRA", AdaLoraConfig, 12, ALL_LINEAR, {"init_r": 12, "lora_alpha": 96, "total_step": 10}, 3),
    "dora": Recipe("DoRA", LoraConfig, 4, ALL_LINEAR, {"r": 16, "lora_alpha": 32, "use_dora": True}, 1.5),
    "dora-odd": Recipe(
        "DoRA", LoraConfig, 5, ("q_proj", "o_proj", "up_proj"), {"r": 5, "lora_alpha": 10, "use_dora": True}, 2
    ),
    "ia3": Recipe("(IA)3", IA3Config, 6, ("k_proj", "v_proj", "down_proj"), {"feedforward_modules": ["down_proj"]}, 2),
    "ia3-attention": Recipe("(IA)3", IA3Config, 7, ("q_proj", "k_proj", "v_proj"), {"feedforward_modules": []}, 2),
    "vera": Recipe("VeRA", VeraConfig, 8, ALL_LINEAR, {"r": 256, "projection_prng_key": 8}, 3),
    "vera-regenerated": Recipe(
        "VeRA", VeraConfig, 9, ("q_proj", "v_proj"), {"r": 256, "projection_prng_key": 9, "save_projection": False}, 6
    ),
    "oft": Recipe("OFT", OFTConfig, 10, ALL_LINEAR, {"oft_block_size": 32}, 2),
    "oft-cayley": Recipe("OFT", OFTConfig, 11, ALL_LINEAR, {"oft_block_size": 32, "use_cayley_neumann": False}, 2),
}


def write_adapter(base: Path | PreTrainedModel, recipe: str | Recipe, folder: Path, **options: Any) -> Path:
    """Write the PEFT folder of `recipe` (a name in AMPLIFIED, or one of your own) for `base`; returns `folder`.

    options: fields of PEFT's configuration that replace the recipe's, such as `r`. The same recipe, options
    and base give the same folder; the global random state is left as it was.
    """
    recipe = AMPLIFIED[recipe] if isinstance(recipe, str) else recipe
    model = copy.deepcopy(base) if isinstance(base, PreTrainedModel) else load_base(base)
    config = recipe.config(target_modules=list(recipe.targets), **{**recipe.options, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        adapted = get_peft_model(model, config)
        _amplify(adapted, recipe.strength)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


@torch.no_grad()
def _amplify(model: torch.nn.Module, strength: float) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = name.partition(".default")[0].rpartition(".")[2]
            parameter.copy_(amplified(kind, parameter, strength * torch.randn(parameter.shape).to(parameter)))


def amplified(kind: str, start: Tensor, z: Tensor) -> Tensor:
    """A parameter's amplified value, from the value PEFT starts it with and standard normal noise of its shape."""
    match kind:
        case "lora_A" | "ranknum":  # the latter is not saved
            return start
        case "lora_B" | "oft_R":
            return 0.02 * z
        case "lora_magnitude_vector":
            return start * (1 + 0.3 * z)
        case "ia3_l" | "lora_E":
            return 1 + 0.3 * z
        case "vera_lambda_d":
            return 0.1 * (1 + 0.3 * z)
        case "vera_lambda_b":
            return 0.5 * z
    raise ValueError(f"no amplified value is known for the parameter {kind}")
