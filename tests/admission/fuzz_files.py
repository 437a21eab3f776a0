"""Mutations of the tensors and of the bytes that they are written as."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import torch
from fuzz_folder import BITS, TORCH, Folder, Tensor


def pick(rng: random.Random, folder: Folder) -> str:
    return rng.choice(list(folder.tensors))


def some_values(rng: random.Random, folder: Folder) -> bool:
    """Other finite values: what is accepted must follow them."""
    tensor = folder.tensors[pick(rng, folder)]
    if tensor.dtype not in TORCH or not tensor.data:
        return False
    values = tensor.values().double()
    values.view(-1)[rng.randrange(values.numel())] += rng.choice([1.0, -3.0, 1e-3, 100.0])
    tensor.data = Tensor.of(values, tensor.dtype).data
    return False


def not_finite(rng: random.Random, folder: Folder) -> bool:
    tensor = folder.tensors[pick(rng, folder)]
    if tensor.dtype not in TORCH or not tensor.data:
        return False
    values = tensor.values()
    values.view(-1)[rng.randrange(values.numel())] = rng.choice([float("nan"), float("inf"), -float("inf")])
    tensor.data = Tensor.of(values, tensor.dtype).data
    return False


def other_precision(rng: random.Random, folder: Folder) -> bool:
    """The values in another dtype, of one tensor or of all."""
    dtype = rng.choice(list(TORCH))
    for name in [pick(rng, folder)] if rng.random() < 0.5 else list(folder.tensors):
        if folder.tensors[name].dtype in TORCH:
            folder.tensors[name] = Tensor.of(folder.tensors[name].values(), dtype)
    return False


def wrong_dtype(rng: random.Random, folder: Folder) -> bool:
    """The same bytes under the name of another dtype."""
    tensor = folder.tensors[pick(rng, folder)]
    tensor.dtype = rng.choice([*BITS, "F8_E4M3", "F4", "BOOL", "C64", "I64", "F6_E2M3", "X", ""])
    return False


def wrong_shape(rng: random.Random, folder: Folder) -> bool:
    """The same bytes in another shape, or a shape that they do not fill."""
    tensor = folder.tensors[pick(rng, folder)]
    shape = list(tensor.shape)
    count = 1
    for size in shape:
        count *= size if isinstance(size, int) else 1
    tensor.shape = rng.choice(
        [
            shape[::-1], [*shape, 1], [1, *shape], [count], [], [0], [0, *shape], [*shape, 0], [count, 1], [1, count],
            [s + 1 for s in shape if isinstance(s, int)], [-1, *shape[1:]], [2**63], [2**64], [2**32, 2**32], [0,
            2**63],
            [2**40, *shape], shape[1:], [float(s) for s in shape if isinstance(s, int)], [str(s) for s in shape],
            [True],
        ]
    )  # fmt: skip
    return False


def resized(rng: random.Random, folder: Folder) -> bool:
    """A tensor of another shape, with values for it: other ranks, other widths, none at all."""
    name = pick(rng, folder)
    tensor = folder.tensors[name]
    if tensor.dtype not in TORCH or not tensor.shape or not all(isinstance(s, int) for s in tensor.shape):
        return False
    axis = rng.randrange(len(tensor.shape))
    shape = list(tensor.shape)
    shape[axis] = rng.choice([0, 1, shape[axis] + 1, max(0, shape[axis] - 1), 2 * shape[axis]])
    folder.tensors[name] = Tensor.of(torch.ones(shape), tensor.dtype)
    return False


def other_rank(rng: random.Random, folder: Folder) -> bool:
    """All factors of one module or of all with one rank more or less; sometimes the config says so too."""
    more = rng.choice([-1, 1, 2])
    module = pick(rng, folder).partition(".lora_")[0]
    everywhere = rng.random() < 0.5
    for name, tensor in list(folder.tensors.items()):
        axis = 0 if name.endswith("lora_A.weight") else 1 if name.endswith("lora_B.weight") else None
        if axis is None or not (everywhere or name.startswith(module)) or tensor.dtype not in TORCH:
            continue
        values = tensor.values()
        rows = values.narrow(axis, 0, 1)
        wide = torch.cat([values, rows, rows], axis)
        folder.tensors[name] = Tensor.of(wide.narrow(axis, 0, max(1, values.shape[axis] + more)), tensor.dtype)
    if not folder.is_compiled and isinstance(folder.config.get("r"), int) and rng.random() < 0.5:
        folder.config["r"] += more
    return False


def swapped_names(rng: random.Random, folder: Folder) -> bool:
    """Names in a circle: two of them, or all of one ending."""
    names = list(folder.tensors)
    if rng.random() < 0.5:
        ending = rng.choice(names).rpartition(".")[2]
        circle = [name for name in names if name.endswith(ending)]
    else:
        circle = rng.sample(names, min(len(names), rng.choice([2, 3])))
    tensors = [folder.tensors[name] for name in circle]
    for name, tensor in zip(circle, tensors[1:] + tensors[:1], strict=True):
        folder.tensors[name] = tensor
    return False


def renamed(rng: random.Random, folder: Folder) -> bool:
    name = pick(rng, folder)
    change: list[Callable[[str], str]] = [
        lambda n: n.replace("base_model.model.", ""),
        lambda n: n.replace("base_model.model.", "base_model."),
        lambda n: f"base_model.model.{n}",
        lambda n: f"module.{n}",
        lambda n: n.replace("layers.0", "layers.9"),
        lambda n: n.replace("layers.0", "layers.00"),
        lambda n: n.replace("layers.0", "layers.1"),
        lambda n: n.replace("q_proj", "v_proj"),
        lambda n: n.replace("q_proj", "q_pr0j"),
        lambda n: n.replace(".weight", ".default.weight"),
        lambda n: n.replace(".weight", ""),
        lambda n: n + ".weight",
        lambda n: n.upper(),
        lambda n: n + " ",
        lambda n: n.replace("a", "а", 1),  # a Cyrillic letter
        lambda n: n + "\u0000",
        lambda n: n.replace(".", "..", 1),
        lambda _: "",
        lambda _: "__metadata__",
        lambda n: n * 300,
        lambda n: n.replace("lora_A", "lora_B") if "lora_A" in n else n.replace("lora_B", "lora_A"),
        lambda n: n.replace("lora_A", "lora_embedding_A"),
    ]
    rename = rng.choice(change)
    everywhere = rng.random() < 0.4
    folder.tensors = {rename(n) if everywhere or n == name else n: t for n, t in folder.tensors.items()}
    return False


def extra_tensor(rng: random.Random, folder: Folder) -> bool:
    name = pick(rng, folder)
    other = rng.choice(
        [
            "x", name + "2", name.replace("q_proj", "o_proj"), name.replace("0", "1", 1), name.replace("lora_A",
            "lora_C"),
            "base_model.model.layers.0.self_attn.q_proj.base_layer.weight", "base_model.model.lm_head.weight",
            "base_model.model.layers.0.self_attn.q_proj.bias", "base_model.model.layers.0.self_attn.q_proj.ia3_l",
            "base_model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "base_model.vera_A",
            "base_model.vera_B",
            "base_model.model.layers.0.self_attn.q_proj.lora_B.bias", "base_model.model.embed_tokens.weight",
            "base_model.model.layers.0.self_attn.q_proj.base_layer.bias", "pair.A",
        ]
    )  # fmt: skip
    if other not in folder.tensors:
        like = folder.tensors[name]
        folder.tensors[other] = rng.choice([Tensor(like.dtype, list(like.shape), like.data), Tensor("F32", [0], b"")])
    return False


def dropped_tensor(rng: random.Random, folder: Folder) -> bool:
    for name in rng.sample(list(folder.tensors), rng.choice([1, 1, 2, len(folder.tensors)])):
        folder.tensors.pop(name, None)
    return False


def other_tensor_order(rng: random.Random, folder: Folder) -> bool:
    """The order of tensors in the file says nothing."""
    items = list(folder.tensors.items())
    rng.shuffle(items)
    folder.tensors = dict(items)
    return True


def odd_metadata(rng: random.Random, folder: Folder) -> bool:
    """Texts by name say nothing; anything else is not safetensors."""
    folder.metadata = rng.choice([None, {}, {"x": "y"}, {"format": "np"}, {"format": 1}, [], "x", {"a": {"b": "c"}}, 3])
    return folder.metadata in (None, {}, {"x": "y"})


def offsets(rng: random.Random, folder: Folder) -> bool:
    """Offsets that overlap, leave a gap, run backwards or past the end, or are those of another tensor."""
    first, second = pick(rng, folder), pick(rng, folder)
    how = rng.randrange(7)

    def change(header: dict[str, Any]) -> None:
        if first not in header or second not in header:
            return
        mine, other = header[first]["data_offsets"], header[second]["data_offsets"]
        choices = [
            other, [mine[0] + 4, mine[1] + 4], [mine[1], mine[0]], [mine[0], mine[1] + 4], [2**62,
            2**62 + mine[1] - mine[0]],
            [-4, mine[1] - mine[0] - 4], [mine[0]],
        ]  # fmt: skip
        header[first]["data_offsets"] = choices[how]
        if how == 0 and rng.random() < 0.5:  # the two change places
            header[second]["data_offsets"] = mine

    folder.on_header.append(change)
    return False


def odd_entry(rng: random.Random, folder: Folder) -> bool:
    """An entry of the header with a field less or more, or that is no object."""
    name, value = pick(rng, folder), rng.choice([None, 1, [], {}, "x", {"dtype": "F32"}, {"dtype": 1, "shape": 2}])
    field = rng.choice(["dtype", "shape", "data_offsets", "extra", None])

    def change(header: dict[str, Any]) -> None:
        if field is None or name not in header:
            header[name] = value
        elif field == "extra":
            header[name]["extra"] = value
        else:
            header[name][field] = value

    folder.on_header.append(change)
    return False


def duplicate_tensor(rng: random.Random, folder: Folder) -> bool:
    """One name twice, with the bytes of each."""
    name, other = pick(rng, folder), pick(rng, folder)

    def change(header: dict[str, Any]) -> str:
        if other not in header or name not in header:
            return json.dumps(header)
        text = json.dumps(header)
        return text[:-1] + ", " + json.dumps(name) + ": " + json.dumps(header[other]) + "}"

    folder.on_header.append(change)
    return False


def header_length(content: bytes) -> int:
    """As far as the bytes go; the mutation before may have cut them off, or made the length another."""
    return max(0, min(int.from_bytes(content[:8], "little"), len(content) - 8))


def damaged_header(rng: random.Random, folder: Folder) -> bool:
    """Bytes of the header, or its length, are others."""
    seed = rng.randrange(2**32)

    def damage(content: bytes) -> bytes:
        mine, length = random.Random(seed), header_length(content)
        if mine.random() < 0.4:
            lengths = [
                0,
                1,
                length - 1,
                length + 1,
                length + 8,
                len(content),
                len(content) - 8,
                2**31,
                10**8 + 1,
                2**63,
                2**64 - 1,
            ]
            return struct.pack("<Q", max(0, mine.choice(lengths))) + content[8:]
        result = bytearray(content)
        for _ in range(mine.choice([1, 1, 2, 10]) if length else 0):
            result[mine.randrange(8, 8 + length)] = mine.choice(
                [mine.randrange(256), mine.choice(b'{}[]",:0123456789 ')]
            )
        return bytes(result)

    folder.on_bytes.append(damage)
    return False


def damaged_values(rng: random.Random, folder: Folder) -> bool:
    """A byte of a tensor is another."""
    seed = rng.randrange(2**32)

    def damage(content: bytes) -> bytes:
        mine, length = random.Random(seed), header_length(content)
        result = bytearray(content)
        if 8 + length < len(result):
            result[mine.randrange(8 + length, len(result))] ^= 1 << mine.randrange(8)
        return bytes(result)

    folder.on_bytes.append(damage)
    return False


def other_length(rng: random.Random, folder: Folder) -> bool:
    """Cut off anywhere, or longer."""
    seed = rng.randrange(2**32)

    def damage(content: bytes) -> bytes:
        mine = random.Random(seed)
        cut = mine.choice([mine.randrange(len(content) + 1), 0, 7, 8, 9, len(content) - 1, len(content) - 4])
        return mine.choice([content[:cut], content[:cut], content + b"\0" * 4, content * 2, b"\0" * 64])

    folder.on_bytes.append(damage)
    return False


MUTATIONS = [
    some_values, not_finite, other_precision, wrong_dtype, wrong_shape, resized, other_rank, swapped_names, renamed,
    extra_tensor, dropped_tensor, other_tensor_order, odd_metadata, offsets, odd_entry, duplicate_tensor,
    damaged_header,
    damaged_values, other_length,
]  # fmt: skip
