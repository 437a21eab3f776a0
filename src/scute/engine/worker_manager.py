"""vLLM's LoRA worker manager, which keeps the ranks in step."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from scute.engine import checks, residency, warm_up
from scute.engine.model_manager import ScuteModelManager
from scute.errors import Code, Refusal


class ScuteWorkerManager(LRUCacheWorkerLoRAManager):
    """Admits PEFT folders of every method and keeps ranks in step."""

    _manager_cls = ScuteModelManager
    _adapter_manager: ScuteModelManager

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: set[int] = set()  # adapters of the last step
        self._version = -1  # of the slots after the last step
        self._names: dict[int, str] = {}
        self._pinned: set[int] = set()  # whether they have a slot or lent it to a step

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        model = self._adapter_manager.lora_model_of(lora_request)
        self._names[lora_request.lora_int_id] = lora_request.lora_name
        return model

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """One that is pinned is so again: in place, or when it comes back. Refuses CAPACITY_PINNED."""
        manager, adapter_id = self._adapter_manager, lora_request.lora_int_id
        if not manager.is_active(adapter_id) and len(manager._active_adapters.pinned_items) >= manager.lora_slots:
            raise Refusal(
                Code.CAPACITY_PINNED,
                f"all --max-loras = {manager.lora_slots} slots are pinned; raise --max-loras, or remove a pinned "
                "adapter and let its requests end.",
            )
        added = super().add_adapter(lora_request)
        if adapter_id in self._pinned:
            self.pin_adapter(adapter_id)
        return added

    def pin_adapter(self, adapter_id: int) -> bool:
        is_pinned = super().pin_adapter(adapter_id)
        self._pinned.add(adapter_id)
        return is_pinned

    def move_pin(self, old_id: int, new_id: int) -> None:
        """From an adapter to the one that takes its place, if it is pinned."""
        if old_id not in self._pinned:
            return
        self.pin_adapter(new_id)
        self._pinned.discard(old_id)
        for cache in self._caches:
            cache.pinned_items.discard(old_id)

    @property
    def _caches(self) -> tuple[Any, Any]:
        return self._adapter_manager._registered_adapters, self._adapter_manager._active_adapters

    @contextlib.contextmanager
    def _lent_slots(self) -> Iterator[None]:
        """A step may take pinned slots, after all others: vLLM's scheduler knows no pins, and a step cannot refuse."""
        pinned = [(cache, cache.pinned_items) for cache in self._caches]
        for cache, _ in pinned:
            cache.pinned_items = set()
        try:
            yield
        finally:
            for cache, items in pinned:
                cache.pinned_items.update(i for i in items if i in cache)

    def _apply_adapters(self, lora_requests: Iterable[LoRARequest]) -> None:
        """In order of id: a set of names iterates differently on every rank, and admission is a collective."""
        manager = self._adapter_manager
        requests = {request.lora_int_id: request for request in lora_requests if request}
        in_place = any(request.load_inplace for request in requests.values())
        if requests.keys() == self._running and self._version == manager.slots.version and not in_place:
            return
        self._running = set(requests)
        for adapter_id in sorted(self._pinned):
            manager.touch(adapter_id)
        missing = []
        for adapter_id, request in sorted(requests.items()):
            if manager.is_active(adapter_id) and not request.load_inplace:
                manager.touch(adapter_id)  # before any other is evicted
            else:
                missing.append(request)
        with self._lent_slots():
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
        self._pinned.discard(adapter_id)
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
