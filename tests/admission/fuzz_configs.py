"""Mutations of the JSON file. Each changes a folder in place and says whether the maths provably stays the same."""

import json
import random
from collections.abc import Iterator
from typing import Any

from fuzz_folder import Folder

WEIRD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -0.0, 1e308, 1e-320, 10**12, 2**63, 2**64, 10**30, float("nan"),
    float("inf"), -float("inf"), "", "x", "4", "true", "all-linear", "ALL-LINEAR", "q_proj", ".*q_proj", "(", "[", "*",
    "(a+)+$", "\\", "a" * 5000, "é", "q_proj\u0000", "ｑ_proj", "\u202eq_proj", "\ud800", [], [[]], [None], [1],
    ["q_proj"],
    ["q_proj", "q_proj"], ["v_proj", "o_proj"], ["embed_tokens"], ["lm_head"], [""], ["layers.0.self_attn.q_proj"], {},
    {"q_proj": 2}, {"q_proj": 4}, {"q_proj": "x"}, {"": 4}, {"(": 4}, {"a": {"b": {"c": [1, [2, [3]]]}}},
    {"x": float("nan")}, [0], [0, 1], [1.0], list(range(1000)),
]  # fmt: skip
OTHERS: dict[str, Any] = {
    "r": 4, "lora_alpha": 8, "use_dora": True, "use_rslora": True, "lora_bias": True, "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 3}, "feedforward_modules": ["q_proj"], "init_ia3_weights": True,
    "save_projection": True,
    "projection_prng_key": 1, "vera_dropout": 0.1, "d_initial": 0.1, "oft_block_size": 4, "coft": True, "eps": 1e-4,
    "block_share": True, "use_cayley_neumann": True, "num_cayley_neumann_terms": 5, "module_dropout": 0.1,
    "bias": "all", "fan_in_fan_out": True, "modules_to_save": ["lm_head"], "trainable_token_indices": [1],
    "layers_to_transform": [0], "layers_pattern": "layers", "exclude_modules": ["q_proj"], "target_parameters": ["x"],
    "layer_replication": [[0, 1]], "init_lora_weights": "pissa", "alora_invocation_tokens": [1], "use_qalora": True,
    "megatron_config": {}, "loftq_config": {}, "corda_config": {}, "eva_config": {}, "auto_mapping": {"a": "b"},
    "inference_mode": False, "task_type": "CAUSAL_LM", "revision": "main", "base_model_name_or_path": "x",
    "runtime_config": {"ephemeral_gpu_offload": True}, "kasa_config": {}, "use_bdlora": {}, "arrow_config": {},
    "format": 1, "members": {}, "weights": {},
}  # fmt: skip
INERT = {
    "peft_version", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping",
    "runtime_config",
    "lora_dropout", "vera_dropout", "module_dropout", "init_ia3_weights", "init_weights", "d_initial",
    "megatron_config",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "ensure_weight_tying", "fan_in_fan_out",
}  # fmt: skip
"""Fields that say how an adapter was trained, not what it computes; PEFT stumbles over odd values in some."""
OFF: list[Any] = [None, False, 0, "", []]
RANKS = [1, 2, 3, 4, 5, 8, 300, 10**9]
TARGETS: list[Any] = [
    "all-linear", ["q_proj"], ["v_proj", "q_proj"], ["q_proj", "v_proj", "o_proj"], ".*(q_proj|v_proj)", "q_proj",
    ".*self_attn.*", ["self_attn.q_proj"], ["k_proj"], ["proj"], ["q_proj", "embed_tokens"], ".*", "",
    ["layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"],
]  # fmt: skip


def any_field(rng: random.Random, folder: Folder) -> bool:
    """Any value of the JSON, at any depth, replaced by a weird one."""
    holder, key = rng.choice(list(places(folder.config)))
    if is_version_of_oft(folder, key):
        return True
    holder[key] = rng.choice(WEIRD)
    return is_inert(folder, holder, key)


def is_inert(folder: Folder, holder: Any, key: Any) -> bool:
    return not folder.is_compiled and holder is folder.config and key in INERT


def is_version_of_oft(folder: Folder, key: Any) -> bool:
    """Scute follows the PEFT that wrote the folder, and the oracle is the PEFT of today (decision 5)."""
    return folder.kind.startswith("oft") and key == "peft_version"


def near_value(rng: random.Random, folder: Folder) -> bool:
    """A value of the JSON replaced by a near one of the same type."""
    holder, key = rng.choice(list(places(folder.config)))
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int | float):
        holder[key] = rng.choice([value + 1, value - 1, value * 2, float(value), str(value), value / 2])
    elif isinstance(value, str) and not is_version_of_oft(folder, key):
        holder[key] = rng.choice(
            [value + " ", value.upper(), value[:-1], value.replace("_", "-"), [value], "\ufeff" + value]
        )
    elif isinstance(value, list):
        holder[key] = rng.choice([value[:-1], value + value[:1], [*value, None], value[0] if value else {}, [value]])
    return is_inert(folder, holder, key)


def remove_field(rng: random.Random, folder: Folder) -> bool:
    holder, key = rng.choice(list(places(folder.config)))
    if is_version_of_oft(folder, key):
        return True
    del holder[key]
    return is_inert(folder, holder, key)


def rename_field(rng: random.Random, folder: Folder) -> bool:
    holder, key = rng.choice([(h, k) for h, k in places(folder.config) if isinstance(h, dict)])
    if is_version_of_oft(folder, key):
        return True
    other = rng.choice([key.upper(), key + " ", " " + key, key.replace("r", "ｒ"), key + "\u200b", key[:-1], key * 2])
    holder[other] = holder.pop(key)
    return other == key


def field_of_another_method(rng: random.Random, folder: Folder) -> bool:
    name = rng.choice(list(OTHERS))
    folder.config[name] = OTHERS[name]
    return is_inert(folder, folder.config, name)


def unknown_field(rng: random.Random, folder: Folder) -> bool:
    """Off, it changes nothing; on, it must be refused, which PEFT does not do."""
    value = rng.choice([*OFF, *WEIRD])
    folder.config[rng.choice(["use_sideways", "_", "r2", "lora", "\u00e9", "x" * 300])] = value
    return not folder.is_compiled and not value


def switches(rng: random.Random, folder: Folder) -> bool:
    """Fields that change the maths of the same tensors: what is accepted must follow PEFT."""
    choices: dict[str, list[Any]] = {
        "r": RANKS, "lora_alpha": [*RANKS, 0, -2, 0.5, 1e300], "use_rslora": [True, False], "use_dora": [True, False],
        "lora_bias": [True, False], "bias": ["none", "all", "lora_only", "oft_only", "vera_only"],
        "rank_pattern": [{}, {"q_proj": 4}, {"v_proj": 3}, {".*q_proj": 4}, {"0.self_attn.q_proj": 4}, None],
        "alpha_pattern": [{}, {"q_proj": 3}, {"v_proj": 1.5}, {"^layers.0.*": 2}, {"q_proj|v_proj": 5}, None],
        "coft": [True, False], "eps": [0, 1e-6, 1e-2, 1, 100], "block_share": [True, False],
        "use_cayley_neumann": [True, False], "num_cayley_neumann_terms": [1, 2, 3, 4, 5, 6, 9],
        "feedforward_modules": [[], ["o_proj"], ["down_proj"], ["q_proj", "down_proj"], ".*down_proj", "x", None],
        "save_projection": [True, False], "projection_prng_key": [0, 1, 2**31, 2**63, -1],
        "oft_block_size": [0, 2, 3, 4, 6], "peft_type": ["LORA", "IA3", "VERA", "OFT", "LOHA", "BOFT", "lora"],
        "d_initial": [0.5], "vera_dropout": [0.5], "lora_dropout": [0.5, 1.0], "fan_in_fan_out": [True, False],
        "inference_mode": [True, False], "init_lora_weights": [True, False, "gaussian", "olora", "loftq", "EVA", "x"],
        "layers_to_transform": [None, [], 0, [0], [0, 1], [7], -1], "layers_pattern": [None, "layers", ["layers"], "h"],
        "exclude_modules": [None, [], ["v_proj"], ".*layers.1.*", "x"],
    }  # fmt: skip
    known = [name for name in choices if name in folder.config] or list(choices)
    name = rng.choice(known)
    folder.config[name] = rng.choice(choices[name])
    return is_inert(folder, folder.config, name)


def targets(rng: random.Random, folder: Folder) -> bool:
    """Targets that are the same, fewer, more or others than the tensors'."""
    folder.config["target_modules"] = rng.choice(TARGETS)
    return False


def other_order(rng: random.Random, folder: Folder) -> bool:
    """Neither the order of keys nor that of targets says anything, but for that of patterns, which stay."""
    items = list(folder.config.items())
    rng.shuffle(items)
    folder.config = dict(items)
    if isinstance(folder.config.get("target_modules"), list):
        rng.shuffle(folder.config["target_modules"])
    return True


def duplicate_key(rng: random.Random, folder: Folder) -> bool:
    """Once more with the same value or with another: readers do not agree on which of them counts."""
    if not folder.config:
        return False
    key = rng.choice(list(folder.config))
    value = folder.config[key] if rng.random() < 0.3 else rng.choice(WEIRD)
    text = json.dumps(folder.config)
    pair = f"{json.dumps(key)}: {json.dumps(value)}"
    folder.text = "{" + pair + ", " + text[1:] if rng.random() < 0.5 else text[:-1] + ", " + pair + "}"
    return False


def damaged_text(rng: random.Random, folder: Folder) -> bool:
    text = json.dumps(folder.config)
    place = rng.randrange(len(text))
    folder.text = rng.choice(
        [
            text[:place],
            text[:place] + rng.choice('{}[]",:0\\\u0000x') + text[place + 1 :],
            "\ufeff" + text,
            text + text,
            text + "x",
            "[" + text + "]",
            "",
            "null",
            "[" * rng.choice([10, 100_000]),
            '{"a":' * 50_000 + "1" + "}" * 50_000,
            text[:-1] + ', "x": ' + "[" * 900 + "]" * 900 + "}",
            text[:-1] + ', "x": ' + "9" * 10_000 + "}",
            text[:-1] + ', "x": ' + '"' + "y" * 200_000 + '"}',
            text[:-1] + ', "x": "\ud800"}',
        ]
    )
    return False


def spaced_text(rng: random.Random, folder: Folder) -> bool:
    """White space, escapes and the last line say nothing."""
    folder.text = json.dumps(folder.config, indent=rng.choice([None, 0, 1, 7])) + rng.choice(["", "\n", " \r\n\t"])
    return True


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value below this one."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from places(inner)


MUTATIONS = [
    any_field, near_value, remove_field, rename_field, field_of_another_method, unknown_field, switches, targets,
    other_order, duplicate_key, damaged_text, spaced_text,
]  # fmt: skip
