"""Adapters to serve: the shapes that the paper trained (appendix D), drawn far enough from the identity to be checked.

A tenant is named KIND.NUMBER, as in `dora.3`. Its folder is what the PEFT library would have saved: names, shapes and
configuration come from PEFT's own model of one layer; values are drawn on the device.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from zlib import crc32

import torch
from peft import IA3Config, LoraConfig, OFTConfig, VeraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from scute.testing.adapters import ALL_LINEAR, Recipe, amplified
from serving.models import column_norms
from serving.pools import kind_of

DEFAULT_OF_IA3 = ("k_proj", "v_proj", "down_proj")
FACTORS = ("lora_A", "lora_B", "vera_A", "vera_B")


def _low_rank(rank: int, targets: Sequence[str] = ALL_LINEAR) -> Recipe:
    """LoRA with alpha twice its rank; its update has the same size at every rank."""
    return Recipe("LoRA", LoraConfig, 0, tuple(targets), {"r": rank, "lora_alpha": 2 * rank}, 8 / rank**0.5)


KINDS: Mapping[str, Recipe] = {
    "lora": _low_rank(16),
    "dora": Recipe("DoRA", LoraConfig, 0, ALL_LINEAR, {"r": 16, "lora_alpha": 32, "use_dora": True}),
    "ia3": Recipe("(IA)3", IA3Config, 0, DEFAULT_OF_IA3, {"feedforward_modules": ["down_proj"]}),
    "vera": Recipe("VeRA", VeraConfig, 0, ALL_LINEAR, {"r": 256}, 3),
    "oft": Recipe("OFT", OFTConfig, 0, ALL_LINEAR, {"oft_block_size": 32}),
    "lora-r8": _low_rank(8),
    "lora-r64": _low_rank(64),
    "lora-r256": _low_rank(256),
    # What a conversion to LoRA would be like; its time depends on its shapes alone.
    "dora-as-r64": _low_rank(64),
    "oft-as-r64": _low_rank(64),
    "ia3-as-r64": _low_rank(64, DEFAULT_OF_IA3),
    "vera-as-r64": _low_rank(64),
    "vera-as-r256": _low_rank(256),
}


class Writer:
    """Writes tenants of one base model."""

    def __init__(self, base: Path, device: str) -> None:
        self.config: LlamaConfig = LlamaConfig.from_pretrained(base)
        self.norms = column_norms(base)
        self.device = device
        self._layer = one_layer(self.config, device)
        self._starts: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def write(self, tenant: str, folder: Path) -> Path:
        """Write the PEFT folder of `tenant`; the same name and base give the same folder."""
        recipe = KINDS[kind_of(tenant)]
        config = recipe.config(target_modules=list(recipe.targets), **recipe.options)
        generator = torch.Generator(self.device).manual_seed(crc32(tenant.encode()))
        tensors = {}
        for key, start in self._start(kind_of(tenant), config).items():
            for layer in range(self.config.num_hidden_layers) if ".layers.0." in key else (0,):
                name = key.replace(".layers.0.", f".layers.{layer}.")
                tensors[name] = self._draw(name, start, recipe.strength, generator)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        config.inference_mode = True
        config.save_pretrained(str(folder))  # last: a folder with a config is complete
        return folder

    def _start(self, kind: str, config: object) -> dict[str, Tensor]:
        """What PEFT would save for one layer of a new adapter of this kind."""
        if kind not in self._starts:
            self._starts[kind] = get_peft_model_state_dict(get_peft_model(twin(self._layer), config))
        return self._starts[kind]

    def _draw(self, name: str, start: Tensor, strength: float, generator: torch.Generator) -> Tensor:
        start = start.to(self.device)
        parts = [part for part in name.split(".") if part != "weight"]
        part, projection = parts[-1], ".".join(parts[2:-1])
        if part in ("vera_A", "vera_B"):
            return start.half().cpu()  # one pair for all tenants, as PEFT draws it from its default key
        if part == "lora_A":
            start = torch.nn.init.kaiming_uniform_(torch.empty_like(start), math.sqrt(5), generator=generator)
        elif part == "lora_magnitude_vector":
            start = self.norms[projection].to(self.device)
        noise = torch.randn(start.shape, generator=generator, device=self.device)
        drawn = amplified(part, start, strength * noise)
        return (drawn.half() if part in FACTORS else drawn.float()).cpu().contiguous()


def one_layer(config: LlamaConfig, device: str) -> PreTrainedModel:
    """A float32 model of one decoder layer as wide as `config`, with next to no vocabulary."""
    narrow = copy.deepcopy(config)
    narrow.num_hidden_layers, narrow.vocab_size = 1, 8
    narrow._attn_implementation = "eager"
    narrow.dtype = torch.float32
    with torch.device(device):
        return LlamaForCausalLM(narrow).float().eval().requires_grad_(False)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares its parameters with `model`, for PEFT to put its layers into."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
