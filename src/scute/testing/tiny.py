"""Random models small enough for unit tests, and sharp enough that every adapter moves their log-probabilities."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 256
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def tiny_llama(folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write a two-layer Llama with grouped-query attention and no biases; returns `folder`."""
    return write_model(LlamaForCausalLM(LlamaConfig(**SHAPE)), folder, dtype, seed)


def tiny_qwen2(folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write a two-layer Qwen2 whose q, k and v biases are as large as its activations; returns `folder`."""
    return write_model(Qwen2ForCausalLM(Qwen2Config(**SHAPE)), folder, dtype, seed)


def llama_8b_shaped(folder: Path, layers: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Path:
    """Write `layers` layers of Llama-3.1-8B's shapes with a small vocabulary; returns `folder`."""
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE | shape))
    return write_model(model.to_empty(device="cpu"), folder, dtype, seed)


def tiny_prompts(count: int = 4, length: int = 24, seed: int = 0) -> list[list[int]]:
    """`count` prompts of random token ids; the i-th is i tokens longer than `length`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length + i,), generator=generator).tolist() for i in range(count)]


def write_model(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write a transformers model with weights drawn by `weight`; returns `folder`."""
    _draw_weights(model, torch.Generator().manual_seed(seed))
    model.to(dtype).save_pretrained(folder)
    return folder


@torch.no_grad()
def _draw_weights(model: nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weight(name, torch.randn(parameter.shape, generator=generator)))


def weight(name: str, noise: Tensor) -> Tensor:
    """The parameter `name` from standard normal noise of its shape.

    Keeps the scale of activations through every layer, and gives the logits a spread of about two.
    """
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.5 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    gain = 2.0 if name == "lm_head.weight" else 1.0
    return gain * noise / math.sqrt(noise.shape[1])
