"""From a Llama GGUF file to a Hugging Face folder: weights, configuration, tokenizer and chat template."""

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

OUTSIDE_LAYERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
INSIDE_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Metadata:
    """The key-value part of a GGUF file."""

    def __init__(self, reader: GGUFReader) -> None:
        self._reader = reader

    def __getitem__(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise KeyError(f"the GGUF file has no field {key}")
        return field.contents()


def convert(gguf: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `gguf` as a Hugging Face folder with weights in `dtype`.

    Raises KeyError for a tensor or field without a known counterpart, RuntimeError where the tensors do not
    fit the model, ValueError for a tokenizer of another family.
    """
    reader = GGUFReader(gguf)
    metadata = Metadata(reader)
    config = _config(metadata)
    weights = {}
    for tensor in reader.tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        weights[hugging_face_name(tensor.name)] = _in_hugging_face_order(tensor.name, values, config).to(dtype)
    config.tie_word_embeddings = "lm_head.weight" not in weights
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    _tokenizer(metadata).save_pretrained(folder)


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor, as "model.norm.weight" for "output_norm.weight"."""
    match name.split("."):
        case ["blk", layer, part, "weight"]:
            return f"model.layers.{layer}.{INSIDE_LAYERS[part]}.weight"
        case [part, "weight"]:
            return f"{OUTSIDE_LAYERS[part]}.weight"
    raise KeyError(f"the GGUF tensor {name} has no known counterpart")


def rotary_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a q or k projection, [heads * head_dim, in], from rotary pairs to rotary halves.

    GGUF lets a rotation act on rows 2i and 2i + 1 of a head, Hugging Face on rows i and i + head_dim / 2.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _in_hugging_face_order(name: str, weight: Tensor, config: LlamaConfig) -> Tensor:
    if name.endswith(".attn_q.weight"):
        return rotary_halves(weight, config.num_attention_heads)
    if name.endswith(".attn_k.weight"):
        return rotary_halves(weight, config.num_key_value_heads)
    return weight


def _config(metadata: Metadata) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        head_dim=metadata["llama.rope.dimension_count"],
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
    )


def _tokenizer(metadata: Metadata) -> PreTrainedTokenizerFast:
    if metadata["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"the tokenizer family {metadata['tokenizer.ggml.pre']} is not known; only smollm is")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # The smollm family takes every digit for itself before it splits as GPT-2 does.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    control = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens(control)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[metadata["tokenizer.ggml.padding_token_id"]],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=metadata["tokenizer.chat_template"],
    )
