"""Tiny random models of transformers: a language model, wrappers around one, packed projections, experts."""

import copy

import torch
import transformers as hf
from torch import nn

from scute.admission import BaseModel

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEEN = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
TOKENS = torch.arange(3, 13).view(2, 5)

LLAMA = hf.LlamaConfig(**TEXT)
PHI3 = hf.Phi3Config(**TEXT)
MIXTRAL = hf.MixtralConfig(**TEXT, num_local_experts=4)
GATED_DELTA_NET = hf.Qwen3NextConfig(
    **TEXT,
    **LINEAR_ATTENTION,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
GEMMA4 = {"sliding_window": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40}
WRAPPERS = {
    "gemma3": hf.Gemma3Config(text_config=TEXT | {"sliding_window": 8}, vision_config=SEEN),
    "gemma4": hf.Gemma4Config(text_config=TEXT | GEMMA4 | {"layer_types": ["sliding_attention", "full_attention"]}),
    "mistral3": hf.Mistral3Config(text_config=hf.MistralConfig(**TEXT), vision_config=hf.PixtralVisionConfig(**SEEN)),
    "llava": hf.LlavaConfig(text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**SEEN)),
}
QWEN3_5 = hf.Qwen3_5Config(
    text_config=TEXT | LINEAR_ATTENTION,
    vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 32},
)


def build(config: hf.PretrainedConfig, kind: type = hf.AutoModelForCausalLM) -> nn.Module:
    """A random model in float32, whose biases and norms are not where they start."""
    torch.manual_seed(0)
    model = kind.from_config(copy.deepcopy(config)).float().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    return model


def text_of(wrapper: nn.Module) -> nn.Module:
    """The language model of a wrapper as a model of its own, with the same weights."""
    text = hf.AutoModelForCausalLM.from_config(copy.deepcopy(wrapper.config.text_config)).float().eval()
    weights = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in wrapper.state_dict().items()
        if name.startswith(("model.language_model.", "lm_head."))
    }
    text.load_state_dict(weights)
    return text


def known(model: nn.Module) -> BaseModel:
    """The base model with weights to hold copies against, which a folder has as they are in the module."""
    weights = dict(model.named_parameters())
    return BaseModel.from_module(model).with_weights(weights.get)
