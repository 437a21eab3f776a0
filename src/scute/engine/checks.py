"""What an engine must be like for Scute to serve it exactly; checked when its LoRA manager is made."""

from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

from scute.engine.bind import package_digest
from scute.engine.layers import ScuteLinear
from scute.engine.upstream import vllm_version
from scute.errors import Incompatible

if TYPE_CHECKING:
    from scute.engine.model_manager import ScuteModelManager

UNSUPPORTED_FLAGS = {
    "fully_sharded_loras": "its layers gather between shrink and expand, where Scute has one operator",
    "specialize_active_lora": "vLLM's graphs for it leave an adapter out when base rows share the batch",
    "enable_tower_connector_lora": "the rows of a tower are not the rows that Scute's plan describes",
}


def check_config(vllm_config: VllmConfig) -> None:
    """Raises Incompatible for a LoRA option that would bypass Scute's operators."""
    for flag, reason in UNSUPPORTED_FLAGS.items():
        if getattr(vllm_config.lora_config, flag, False):
            raise Incompatible(f"Scute cannot serve with --{flag.replace('_', '-')}: {reason}. Leave it out.")
    for is_on, reason in _unsupported_engines(vllm_config):
        if is_on:
            raise Incompatible(f"Scute cannot serve exactly here: {reason}.")
    lora_dtype, dtype = vllm_config.lora_config.lora_dtype, vllm_config.model_config.dtype
    if lora_dtype != dtype:
        raise Incompatible(
            f"Scute's kernels need the factors in the dtype of the activations, but --lora-dtype is {lora_dtype} and "
            f"--dtype is {dtype}: leave --lora-dtype out."
        )
    if envs.VLLM_LORA_ENABLE_DUAL_STREAM:
        raise Incompatible(
            "Scute's expand scales the output of the base GEMM, so it cannot run beside it: unset "
            "VLLM_LORA_ENABLE_DUAL_STREAM."
        )


def _unsupported_engines(vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    sleeps = model.enable_sleep_mode and vllm_version().startswith("0.32.")
    return [
        (model.is_encoder_decoder, "the rows of cross attention are not those of the batch in encoder-decoder models"),
        (cache.kv_sharing_fast_prefill, "--kv-sharing-fast-prefill runs layers on some of the batch's rows"),
        (sleeps, "sleep mode of vLLM 0.32 discards the slots; use 0.33"),
        (envs.VLLM_BATCH_INVARIANT, "VLLM_BATCH_INVARIANT asks for sums that do not depend on the size of the batch"),
    ]


def check_layers(manager: "ScuteModelManager") -> None:
    """Raises Incompatible if a layer is not what adapters were made for, or was wrapped by another class."""
    foreign = [
        name
        for name, layer in manager.modules.items()
        if isinstance(layer, BaseLinearLayerWithLoRA) and not isinstance(layer, ScuteLinear)
    ]
    if any(hasattr(module, "permute_qk_weight_for_rotary") for module in manager.model.modules()):
        raise Incompatible("vLLM reorders the rows of q and k when it loads this model; adapters would not fit them.")
    if foreign:
        raise Incompatible(f"{foreign[0]} was wrapped by {type(manager.modules[foreign[0]]).__name__}, not by Scute.")


def check_ranks(manager: "ScuteModelManager") -> None:
    """Raises Incompatible if the tensor-parallel ranks run different versions of Scute, or with other options."""
    group = get_tp_group()
    if group.world_size == 1:
        return
    mine = f"{package_digest()} {manager.options}"
    everyone: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(everyone, mine, group=group.cpu_group)
    if any(theirs != mine for theirs in everyone):
        raise Incompatible(
            "the tensor-parallel ranks run different versions of Scute; install the same one everywhere."
        )
