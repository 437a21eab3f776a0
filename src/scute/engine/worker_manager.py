"""vLLM's LoRA worker manager, which keeps the ranks in step."""

from collections.abc import Iterable
from typing import Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from scute.engine import checks, residency, warm_up
from scute.engine.model_manager import ScuteModelManager


class ScuteWorkerManager(LRUCacheWorkerLoRAManager):
    """Admits PEFT folders of every method and keeps ranks in step."""

    _manager_cls = ScuteModelManager
    _adapter_manager: ScuteModelManager

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: set[int] = set()  # adapters of the last step
        self._version = -1  # of the slots after the last step
        self._names: dict[int, str] = {}

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        model = self._adapter_manager.lora_model_of(lora_request)
        self._names[lora_request.lora_int_id] = lora_request.lora_name
        return model

    def _apply_adapters(self, lora_requests: Iterable[LoRARequest]) -> None:
        """In order of id: a set of names iterates differently on every rank, and admission is a collective."""
        manager = self._adapter_manager
        requests = {request.lora_int_id: request for request in lora_requests if request}
        in_place = any(request.load_inplace for request in requests.values())
        if requests.keys() == self._running and self._version == manager.slots.version and not in_place:
            return
        self._running = set(requests)
        missing = []
        for adapter_id, request in sorted(requests.items()):
            if manager.is_active(adapter_id) and not request.load_inplace:
                manager.touch(adapter_id)  # before any other is evicted
            else:
                missing.append(request)
        super()._apply_adapters(missing)
        self._version = manager.slots.version

    def create_lora_manager(self, model: Any, vllm_config: Any) -> Any:
        checks.check_config(vllm_config)
        wrapped = super().create_lora_manager(model, vllm_config)
        checks.check_layers(self._adapter_manager)
        checks.check_ranks(self._adapter_manager)
        if self.device.type == "cuda":
            warm_up.run(self._adapter_manager)
        return wrapped

    def list_adapters(self) -> set[int]:
        """vLLM's copies the cache twice, and asks for it once for every adapter that a step adds."""
        return self._adapter_manager.registered_ids()

    def add_dummy_lora(self, lora_request: LoRARequest, rank: int) -> bool:  # noqa: ARG002
        """vLLM would make zeros for every layer, and pin them for every slot."""
        return self._adapter_manager.add_dummy(lora_request.lora_int_id)

    def remove_adapter(self, adapter_id: int) -> bool:
        self._adapter_manager.store.drop(adapter_id)
        self._names.pop(adapter_id, None)
        return super().remove_adapter(adapter_id)

    def force_routes(self, *, shared: bool, rotation: bool) -> None:
        self._adapter_manager.force_routes(shared=shared, rotation=rotation)

    def report(self) -> dict[str, Any]:
        """What the adapters of this rank hold, as `residency.merge` takes it."""
        return residency.report(self._adapter_manager, self._names)

    def readmit(self) -> None:
        """Compile DoRA adapters again: the base weights, and so their scales, have changed."""
        self._adapter_manager.restore_device_memory()
        self._adapter_manager.readmit_dora()
