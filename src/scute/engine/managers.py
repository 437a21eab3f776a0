"""vLLM's two LoRA managers with Scute's admission, activation and batch plan."""

import functools
import time
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.lora.layers import LoRAMapping, LoRAMappingType
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_supported_lora_modules, parse_fine_tuned_lora_name
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from scute.algebra.form import SharedPair
from scute.engine import checks, graphs
from scute.engine.admit import admit
from scute.engine.base import base_model_of
from scute.engine.layers import ScuteLinear
from scute.engine.options import Options
from scute.engine.packing import PackedAdapter
from scute.engine.placement import index_places
from scute.engine.slots import SharedPairs, Sizes
from scute.engine.store import HostStore, half_of_memory_gib
from scute.errors import Code, Incompatible, Refusal
from scute.kernels.plan import BatchPlan
from scute.kernels.routes import Route

logger = init_logger("vllm.scute")


class ScuteModelManager(LRUCacheLoRAModelManager):
    """Owns the slot buffers, the places of the projections and the plan of the current batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vllm_config = kwargs["vllm_config"]
        self.options = Options.read(vllm_config)
        self.base_model = base_model_of(vllm_config.model_config)
        self.uses_mla = vllm_config.model_config.use_mla
        self.pipeline_parallel = vllm_config.parallel_config.pipeline_parallel_size > 1
        self.pairs: SharedPairs | None = None
        self.dummy_ids: set[int] = set()
        super().__init__(*args, **kwargs)
        budget = self.options.host_memory_gib
        self.store = HostStore(half_of_memory_gib() if budget is None else budget, self._forget)

    def _create_lora_modules(self) -> None:
        """Wrap the projections, but neither embeddings nor heads. Raises Incompatible.

        vLLM maps a head's rows by request, which is wrong for prompt log-probabilities and speculative decoding, and
        every adapter row pays a wrapped head.
        """
        embeddings = set(self.model.embedding_modules)
        asked = embeddings.intersection(self.lora_config.target_modules or ())
        if asked:
            raise Incompatible(f"Scute adapts no embeddings or heads: leave {min(asked)} out of --lora-target-modules.")
        names = get_supported_lora_modules(self.model)
        self.supported_lora_modules = [name for name in names if name not in embeddings]
        super()._create_lora_modules()
        self.places = index_places(self.packed_modules, self.modules)
        self._allocate()

    def _allocate(self) -> None:
        sizes = Sizes(
            self.lora_slots,
            self.lora_config.max_lora_rank,
            self.options.rotation_width,
            self.options.shared_rank,
            self.lora_config.lora_dtype,
            self.device,
        )
        layers: dict[str, Any] = {n: layer for n, layer in self.modules.items() if isinstance(layer, ScuteLinear)}
        parts = self._part_sizes(layers)
        if self.options.shared_pairs:
            max_in = max(layer.base_layer.input_size for layer in layers.values())
            max_out = max(size for sizes_of_layer in parts.values() for size in sizes_of_layer)
            self.pairs = SharedPairs(sizes, self.options.shared_pairs, max_in, max_out)
        self.plan = BatchPlan(self.max_num_batched_tokens, self.lora_slots, self.device)
        row_start = torch.arange(self.lora_slots, dtype=torch.int32, device=self.device) * sizes.max_rank
        for name, layer in layers.items():
            layer.allocate(sizes, row_start, self.pairs, parts[name], self.plan)
        self._pair_of_slot = np.full(self.lora_slots, -1, dtype=np.int32)
        self._rotated = np.zeros(self.lora_slots, dtype=bool)

    def _part_sizes(self, layers: dict[str, Any]) -> dict[str, list[int]]:
        """Full output size of every projection that is fused into each layer."""
        outputs = {self.engine_name(n): p.out_features for n, p in self.base_model.projections.items()}
        sizes: dict[str, list[int]] = {}
        for name, layer in layers.items():
            names = self.packed_modules.get(name) or [name]
            known = all(part in outputs for part in names)
            sizes[name] = [outputs[part] for part in names] if known else [layer.base_layer.output_size]
        return sizes

    def engine_name(self, name: str) -> str:
        """vLLM's name of a projection of the base model."""
        renamed: str = parse_fine_tuned_lora_name(f"base_model.model.{name}.lora_A.weight", self._renames)[0]
        return renamed

    @functools.cached_property
    def _renames(self) -> Any:
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()

    def check_room_for(self, pair: SharedPair, adapter_id: int) -> None:
        """Raises Refusal if the pair can have no place; adapters that are admitted keep theirs until removed."""
        if self.pairs is None:
            raise Refusal(
                Code.CAPACITY_SHARED, "VeRA is switched off: shared_pairs is 0 in additional_config['scute']."
            )
        self.pairs.check_fits(pair)
        if not self.pairs.has_room_for(pair, adapter_id):
            raise Refusal(
                Code.CAPACITY_SHARED,
                f"all {self.options.shared_pairs} places for shared VeRA projections are in use by adapters with other "
                "projections; raise shared_pairs in additional_config['scute'], or unload an adapter that holds one.",
            )

    def lora_model_of(self, request: LoRARequest) -> LoRAModel:
        """The adapter of a request as vLLM's caches hold it; from the host store where it is still there."""
        adapter_id, path = request.lora_int_id, request.lora_path
        packed = None if request.load_inplace else self.store.get(adapter_id, path)
        if packed is None:
            start = time.perf_counter()
            packed = self._admit(adapter_id, path)
            seconds = time.perf_counter() - start
            logger.info("Admitted %s adapter %r in %.2f s", packed.method, request.lora_name, seconds)
        return self._as_lora_model(adapter_id, packed)

    def readmit_dora(self) -> None:
        """Admit again, now rather than in a step; one that is refused by now is dropped, with its reason in the log."""
        for adapter_id, path in self.store.paths(method="DoRA"):
            self.store.drop(adapter_id)
            try:
                self._admit(adapter_id, path)
            except Refusal as refusal:
                logger.error("Adapter %d is dropped: %s", adapter_id, refusal)

    def _admit(self, adapter_id: int, path: str) -> PackedAdapter:
        packed = admit(self, adapter_id, path)
        self.store.put(adapter_id, path, packed)
        graphs.record(adapter_id, low_rank_only=packed.pair_key is None and not packed.rotates)
        return packed

    def _as_lora_model(self, adapter_id: int, packed: PackedAdapter) -> LoRAModel:
        """vLLM's record of the adapter: zero-rank factors to page, with the slots attached."""
        names = packed.layers or [next(iter(self.modules))]  # a pipeline stage may have no part of the adapter
        empty = torch.empty(0, 1), torch.empty(1, 0)
        loras = {name: LoRALayerWeights(name, 0, 1, *empty, scaling=1.0) for name in names}
        model = LoRAModel(adapter_id, 0, loras)
        model.scute = packed
        return model

    def _forget(self, adapter_id: int) -> None:
        graphs.forget(adapter_id)
        if self.pairs is not None:
            self.pairs.release(adapter_id)

    def activate_adapter(self, lora_id: int) -> bool:
        activated = super().activate_adapter(lora_id)
        if activated:
            slot = self.lora_index_to_id.index(lora_id)
            packed: PackedAdapter | None = getattr(self._registered_adapters[lora_id], "scute", None)
            self._pair_of_slot[slot], self._rotated[slot] = -1, False
            if packed is not None:
                self._write_slot(slot, packed)
        return activated

    def _write_slot(self, slot: int, packed: PackedAdapter) -> None:
        for name, pieces in packed.layers.items():
            layer: Any = self.modules[name]
            layer.set_slots(slot, pieces)
        if packed.pair_key is not None and self.pairs is not None:
            self._pair_of_slot[slot] = self.pairs.place_of(packed.pair_key)
        self._rotated[slot] = packed.rotates
        self._last_mapping = None  # a slot may have changed its method under an unchanged mapping

    def _set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        super()._set_adapter_mapping(mapping)
        if mapping.type == LoRAMappingType.LANGUAGE:
            ids = np.asarray(mapping.index_mapping, dtype=np.int64)
            force = bool(self.dummy_ids) and not self.dummy_ids.isdisjoint(np.unique(ids).tolist())
            self.plan.update(self._slots_of(ids), self._pair_of_slot, self._rotated, force_routes=force)

    def _slots_of(self, adapter_ids: np.ndarray) -> np.ndarray:
        """Slot of every row, -1 for base rows; adapter_ids: [rows], 0 for base rows."""
        slots = np.full(adapter_ids.shape, -1, dtype=np.int32)
        for slot, adapter_id in enumerate(self.lora_index_to_id):
            if adapter_id is not None:
                slots[adapter_ids == adapter_id] = slot
        return slots

    def remove_all_adapters(self) -> None:
        super().remove_all_adapters()
        self.dummy_ids.clear()


class ScuteWorkerManager(LRUCacheWorkerLoRAManager):
    """Admits PEFT folders of every method and keeps ranks in step."""

    _manager_cls = ScuteModelManager
    _adapter_manager: ScuteModelManager

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: set[int] = set()  # adapters of the last step
        self._leaving: set[int] = set()  # removed while they ran: kept for as long as they do
        self._in_step = False

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        if not self._in_step:  # an admission: what was removed makes room, though a last step may not have told
            for adapter_id in list(self._leaving):
                self._leave(adapter_id)
        return self._adapter_manager.lora_model_of(lora_request)

    def _apply_adapters(self, lora_requests: set[LoRARequest]) -> None:
        """In order of id: a set of names iterates differently on every rank, and admission is a collective."""
        ordered = sorted(filter(None, lora_requests), key=lambda request: request.lora_int_id)
        self._running = {request.lora_int_id for request in ordered}
        for adapter_id in self._leaving - self._running:
            self._leave(adapter_id)
        self._in_step = True
        try:
            super()._apply_adapters(ordered)
        finally:
            self._in_step = False

    def _leave(self, adapter_id: int) -> None:
        self._leaving.discard(adapter_id)
        self._adapter_manager.store.drop(adapter_id)

    def create_lora_manager(self, model: Any, vllm_config: Any) -> Any:
        checks.check_config(vllm_config)
        wrapped = super().create_lora_manager(model, vllm_config)
        checks.check_layers(self._adapter_manager)
        checks.check_ranks(self._adapter_manager)
        return wrapped

    def add_dummy_lora(self, lora_request: LoRARequest, rank: int) -> bool:
        added = super().add_dummy_lora(lora_request, rank)
        if added:
            self._adapter_manager.dummy_ids.add(lora_request.lora_int_id)
        return added

    def remove_adapter(self, adapter_id: int) -> bool:
        if adapter_id in self._running:
            self._leaving.add(adapter_id)
        else:
            self._leave(adapter_id)
        return super().remove_adapter(adapter_id)

    def force_routes(self, *, shared: bool, rotation: bool) -> None:
        """Make the routes of the current plan live or not, for a graph that is captured with them."""
        live = self._adapter_manager.plan.live
        live[Route.SHARED], live[Route.ROTATION] = shared, rotation

    def readmit(self) -> None:
        """Compile DoRA adapters again: the base weights, and so their scales, have changed."""
        self._adapter_manager.readmit_dora()
