"""The GGUF converter, on a file written here from a model whose log-probabilities are known."""

import gguf
import pytest
import torch
from transformers import AutoTokenizer

from scute.agreement import mean_difference
from scute.demo.gguf_folder import INSIDE_LAYERS, OUTSIDE_LAYERS, convert, hugging_face_name, rotary_halves
from scute.testing.oracle import Oracle
from scute.testing.tiny import SHAPE, tiny_llama, tiny_prompts

CONTROL = ["<|unk|>", "<|start|>", "<|end|>"]


def test_rotating_pairs_and_then_reordering_is_reordering_and_then_rotating_halves():
    heads, head_dim = 2, 8
    weight, x = torch.randn(heads * head_dim, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    turns = torch.exp(1j * torch.rand(head_dim // 2, dtype=torch.float64))
    pairs = torch.view_as_complex((weight @ x).reshape(heads, -1, 2)) * turns
    first, second = (rotary_halves(weight, heads) @ x).reshape(heads, 2, -1).unbind(1)
    halves = torch.complex(first, second) * turns
    torch.testing.assert_close(halves, pairs)


@pytest.mark.parametrize("name", ["output.bias", "blk.0.attn_sinks.weight", "rope_freqs.weight"])
def test_unknown_tensor_is_refused(name):
    with pytest.raises(KeyError):
        hugging_face_name(name)


def test_converted_model_is_the_model(tmp_path):
    original = Oracle(tiny_llama(tmp_path / "original"))
    write_gguf(tmp_path / "model.gguf", original.base.state_dict())
    convert(tmp_path / "model.gguf", tmp_path / "converted", torch.float32)
    converted = Oracle(tmp_path / "converted")
    prompts = tiny_prompts()
    assert mean_difference(converted.logprobs(prompts), original.logprobs(prompts)) < 1e-6


def test_converted_tokenizer_splits_digits_and_keeps_control_tokens(tmp_path):
    write_gguf(tmp_path / "model.gguf", Oracle(tiny_llama(tmp_path / "original")).base.state_dict())
    convert(tmp_path / "model.gguf", tmp_path / "converted", torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "converted")
    tokens = tokenizer.tokenize("<|start|>ab11")
    assert tokens == ["<|start|>", "ab", "1", "1"]
    assert tokenizer.apply_chat_template([{"content": "ab"}], tokenize=False) == "<|start|>ab<|end|>"


def write_gguf(path, state):
    """A GGUF of a tiny Llama, its rotary rows in pairs; its tokenizer would merge "11" if it did not split digits."""
    tokens = [*CONTROL, "a", "b", "1", "ab", "11"]
    tokens += [f"<{i}>" for i in range(SHAPE["vocab_size"] - len(tokens))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(SHAPE["vocab_size"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_rope_dimension_count(SHAPE["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in CONTROL else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges(["a b", "1 1"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}")
    heads = {"attn_q": SHAPE["num_attention_heads"], "attn_k": SHAPE["num_key_value_heads"]}
    for name, weight in state.items():
        part = gguf_name(name)
        kind = part.split(".")[-2]
        writer.add_tensor(part, (rotary_pairs(weight, heads[kind]) if kind in heads else weight).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name):
    inside = {ours: theirs for theirs, ours in INSIDE_LAYERS.items()}
    outside = {ours: theirs for theirs, ours in OUTSIDE_LAYERS.items()}
    module = name.removesuffix(".weight")
    if module in outside:
        return f"{outside[module]}.weight"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{inside[part]}.weight"


def rotary_pairs(weight, heads):
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()
