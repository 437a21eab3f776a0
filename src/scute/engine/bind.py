"""Every place where Scute puts itself into vLLM: names are bound to subclasses or wrappers, nothing is edited."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scute
from scute.errors import Incompatible

_MARK = "__scute_original__"


def bind() -> None:
    """Bind all of them. Raises Incompatible if another plugin was here first."""
    bind_layers()
    bind_worker_manager()
    bind_compile_key()
    bind_reset()
    bind_rows()
    bind_refusals()
    bind_prefix_cache()
    bind_removals()
    bind_graphs()
    bind_front_end()
    bind_observation()
    bind_log_lines()


def bind_layers() -> None:
    """`from_layer` consults this tuple for the class of every wrapped layer."""
    import vllm.lora.utils as lora_utils

    from scute.engine.layers import scute_classes

    _expect_vllm("vllm.lora.utils._all_lora_classes", *lora_utils._all_lora_classes)
    lora_utils._all_lora_classes = scute_classes(lora_utils._all_lora_classes)


def bind_worker_manager() -> None:
    """`load_lora_model` names the worker manager once, in this module."""
    import vllm.v1.worker.lora_model_runner_mixin as mixin

    from scute.engine.worker_manager import ScuteWorkerManager

    _expect_vllm("LRUCacheWorkerLoRAManager", mixin.LRUCacheWorkerLoRAManager)
    mixin.LRUCacheWorkerLoRAManager = ScuteWorkerManager


def bind_compile_key() -> None:
    """vLLM's compile cache and start-up plan do not see plugins: make the key of LoRA engines cover this package."""
    from vllm.config.lora import LoRAConfig

    original = LoRAConfig.compute_hash

    def compute_hash(self: LoRAConfig) -> str:
        return hashlib.sha256(f"{original(self)} scute {package_digest()}".encode()).hexdigest()

    _wrap(LoRAConfig, "compute_hash", compute_hash)


def bind_reset() -> None:
    """When base weights are replaced, DoRA's scales are stale: compute them again."""
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    original = LoRAModelRunnerMixin.reset_lora_state

    def reset_lora_state(self: Any) -> None:
        original(self)
        if self.lora_config:
            self.lora_manager.readmit()

    _wrap(LoRAModelRunnerMixin, "reset_lora_state", reset_lora_state)


def bind_rows() -> None:
    """Hand the adapters of a step's rows on as arrays: both model runners look these names up in their module."""
    import vllm.v1.worker.gpu.model_runner as runner_module
    import vllm.v1.worker.lora_model_runner_mixin as mixin
    from vllm.v1.worker.gpu_input_batch import InputBatch

    from scute.engine.rows import RowMapping, RowState, with_every_version

    _expect_vllm("LoRAMapping", mixin.LoRAMapping)
    _expect_vllm("LoraState", runner_module.LoraState)
    mixin.LoRAMapping = RowMapping
    runner_module.LoraState = RowState
    _wrap(InputBatch, "make_lora_inputs", with_every_version(InputBatch.make_lora_inputs))


def bind_refusals() -> None:
    """A refusal is an answer of every worker: an exception of one would leave the others' answers unread."""
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    from scute.engine import refusals

    _wrap(LoRAModelRunnerMixin, "add_lora", refusals.answer_with_refusal(LoRAModelRunnerMixin.add_lora))
    _wrap(Executor, "add_lora", refusals.raise_answered_refusal(Executor.add_lora))


def bind_prefix_cache() -> None:
    """Key cached prefixes on the load of an adapter too, not on its name and path alone."""
    from scute.engine import prefix_cache

    prefix_cache.bind()


def bind_removals() -> None:
    """Put the removal of an adapter off until the step after which no request uses it, and load others beside it.

    After the prefix cache, whose keys are by the ids in the engine.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    from scute.engine import removals

    add, remove, listed = EngineCore.add_lora, EngineCore.remove_lora, EngineCore.list_loras
    make = EngineCore.preprocess_add_request
    _wrap(EngineCore, "add_lora", removals.add_beside_used(add, remove))
    _wrap(EngineCore, "remove_lora", removals.remove_when_unused(remove))
    _wrap(EngineCore, "list_loras", removals.list_loaded(listed, remove))
    _wrap(EngineCore, "pin_lora", removals.pin_loaded(EngineCore.pin_lora))
    _wrap(EngineCore, "preprocess_add_request", removals.make_with_loaded(make))
    _wrap(EngineCore, "add_request", removals.queue_with_loaded(EngineCore.add_request))
    _wrap(EngineCore, "post_step", removals.finish_after_steps(EngineCore.post_step, remove))
    WorkerBase.scute_move_pin = lambda self, old_id, new_id: self.model_runner.lora_manager.move_pin(old_id, new_id)


def bind_graphs() -> None:
    """Capture CUDA graphs per set of live routes (V2 model runner)."""
    from scute.engine import graphs

    graphs.bind()


def bind_front_end() -> None:
    """Admit adapters before their requests are queued, look names up, and answer refusals with HTTP 400."""
    from scute.engine import front_end

    if front_end.is_front_end():
        front_end.bind()
        from scute.engine import serving

        serving.bind()


def bind_observation() -> None:
    """Workers tell what their adapters hold, and a front end asks them where /metrics or /v1/models is read."""
    from vllm.v1.worker.worker_base import WorkerBase

    from scute.engine import front_end

    WorkerBase.scute_report = lambda self: self.model_runner.lora_manager.report()
    if front_end.is_front_end():
        from scute.engine import observation

        observation.bind()


def bind_log_lines() -> None:
    """A refusal is a line of the log, and a reload warns of nothing."""
    from scute.engine import log_lines

    log_lines.bind()


def package_digest() -> str:
    """Digest of Scute's version and sources."""
    digest = hashlib.sha256(scute.__version__.encode())
    for path in sorted(Path(scute.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    setattr(wrapper, _MARK, getattr(owner, name))
    setattr(owner, name, wrapper)


def _expect_vllm(what: str, *found: type) -> None:
    foreign = [cls for cls in found if not cls.__module__.startswith("vllm.")]
    if foreign:
        raise Incompatible(
            f"another plugin has already replaced {what} by {foreign[0].__module__}.{foreign[0].__name__}"
        )
