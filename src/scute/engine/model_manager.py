"""vLLM's LoRA model manager with Scute's arena, admission, activation and batch plan."""

import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.lora.layers import LoRAMapping, LoRAMappingType
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_supported_lora_modules, parse_fine_tuned_lora_name
from vllm.platforms import current_platform

from scute.admission.memory import GIB
from scute.algebra.form import SharedPair
from scute.engine import graphs
from scute.engine.admit import admit
from scute.engine.arena import Arena
from scute.engine.base import base_model_of
from scute.engine.capacity import LEAST_SHARE, LayerShape, Limits, largest_batch, largest_rank
from scute.engine.layers import ScuteLinear
from scute.engine.options import Options
from scute.engine.packing import PackedAdapter
from scute.engine.pairs import SharedPairs
from scute.engine.placement import index_places
from scute.engine.slots import BASE_ID, ActiveSlots
from scute.engine.store import HostStore, half_of_memory_gib
from scute.errors import Code, Incompatible, Refusal
from scute.kernels.plan import UNBOUNDED, BatchPlan
from scute.kernels.routes import UNIT_BYTES, Route

logger = init_logger("vllm.scute")

MOST_NAMED = 10_000
"""Adapters whose evictions are counted one by one until somebody asks; beyond, they count as those of nobody."""


class ScuteModelManager(LRUCacheLoRAModelManager):
    """Owns the arena, the places of the projections and the plan of the current batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vllm_config = kwargs["vllm_config"]
        self.options = Options.read(vllm_config)
        self.base_model = base_model_of(vllm_config.model_config, vllm_config.load_config.download_dir)
        self.uses_mla = vllm_config.model_config.use_mla
        self._memory_share = vllm_config.cache_config.gpu_memory_utilization
        self.pipeline_parallel = vllm_config.parallel_config.pipeline_parallel_size > 1
        self.pairs: SharedPairs | None = None
        super().__init__(*args, **kwargs)
        budget = self.options.host_memory_gib
        self.store = HostStore(half_of_memory_gib() if budget is None else budget, self._forget)
        self._evictions: Counter[int] = Counter()

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
        options, dtype = self.options, self.lora_config.lora_dtype
        shared_rank = options.shared_rank if options.shared_pairs else 0
        flag = self.lora_config.max_lora_rank
        limits = Limits(largest_rank(flag), flag, options.rotation_width, shared_rank, dtype)
        layers: dict[str, Any] = {n: layer for n, layer in self.modules.items() if isinstance(layer, ScuteLinear)}
        parts = self._part_sizes(layers)
        if options.shared_pairs:
            max_in = max((layer.base_layer.input_size for layer in layers.values()), default=0)
            max_out = max((size for sizes in parts.values() for size in sizes), default=0)
            self.pairs = SharedPairs(options.shared_pairs, shared_rank, max_in, max_out, dtype, self.device)
        self.num_slices = 0
        for name, layer in layers.items():
            layer.prepare(self.num_slices, parts[name], limits, self.pairs)
            self.num_slices += len(layer.output_slices)
        self.arena = self._arena_for([layer.shape for layer in layers.values()], limits)
        self.plan = BatchPlan(
            self.max_num_batched_tokens, self.lora_slots, options.shared_pairs, limits.rank, self.device
        )
        for layer in layers.values():
            layer.connect(self.arena, self.plan, limits)
        self.slots = ActiveSlots(
            self.lora_slots, np.zeros(0, dtype=np.int32) if self.pairs is None else self.pairs.host_rank
        )
        self.max_rank, self.dummy_rank = limits.rank, limits.dummy_rank
        self.pins_memory = self.device.type == "cuda"
        self._has_other_layers = len(layers) < len(self.modules)
        self._planned: tuple[int, np.ndarray] | None = None

    def _arena_for(self, shapes: list[LayerShape], limits: Limits) -> Arena:
        given = self.options.adapter_memory_gib
        default = self.lora_slots * limits.largest_adapter(shapes)
        if limits.rank > limits.usual_rank:
            default = max(default, self._engine_bytes() // LEAST_SHARE // UNIT_BYTES)
        units = default if given is None else int(given * GIB) // UNIT_BYTES
        logger.info("%.2f GiB of device memory are for adapters", units * UNIT_BYTES / GIB)
        return Arena(units, limits.largest_dummy_piece(shapes), self.lora_slots, self.num_slices, self.device)

    def _engine_bytes(self) -> int:
        """What vLLM may use of this rank's device."""
        total = current_platform.get_device_total_memory()
        if self.device.type == "cuda":  # of this one, or of the part that the process sees
            total = torch.cuda.get_device_properties(self.device).total_memory
        return int(total * self._memory_share)

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

    def check_device_memory(self, adapter_id: int, packed: PackedAdapter) -> None:
        """Raises Refusal unless every batch with this adapter fits the arena, whichever the others are.

        It is the only check: a step activates what is admitted, and cannot refuse.
        """
        others = (other.units for i, other in self.store.adapters().items() if i != adapter_id)
        needed = largest_batch([packed.units, *others], self.lora_slots)
        if needed > self.arena.capacity:
            raise Refusal(
                Code.CAPACITY_DEVICE,
                f"a batch with it may need {_mib(needed)} MiB of device memory for adapters (the largest of all, at "
                f"most --max-loras = {self.lora_slots}), but {_mib(self.arena.capacity)} MiB "
                "are there; raise adapter_memory_gib in additional_config['scute'] (if not given, it follows the other "
                "limits), lower --max-loras, or unload larger adapters.",
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

    def restore_device_memory(self) -> None:
        """What outlives the adapters in it: a sleep of level 2 leaves anything there."""
        for layer in self.modules.values():
            if isinstance(layer, ScuteLinear):
                layer.slots.arrivals.zero_()
        if self.pairs is not None:
            self.pairs.restore()

    def readmit_dora(self) -> None:
        """Admit again, now rather than in a step; one that is refused by now is dropped, with its reason in the log."""
        for adapter_id, path in self.store.paths_needing_base_weights():
            self.store.drop(adapter_id)
            try:
                self._admit(adapter_id, path)
            except Refusal as refusal:
                logger.error("Adapter %d is dropped: %s", adapter_id, refusal)

    def _admit(self, adapter_id: int, path: str) -> PackedAdapter:
        packed = admit(self, adapter_id, path)
        self.store.put(adapter_id, path, packed)
        graphs.record(adapter_id, shared=packed.pair_key is not None, rotation=packed.rotates)
        return packed

    def _as_lora_model(self, adapter_id: int, packed: PackedAdapter) -> LoRAModel:
        """vLLM's record of the adapter: no weights that it knows of, with Scute's attached."""
        model = LoRAModel(adapter_id, 0, {})
        model.scute = packed
        return model

    def add_dummy(self, adapter_id: int) -> bool:
        """Register an adapter of a warm-up batch: factors that are all zeros on every projection."""
        if adapter_id in self._registered_adapters:
            return False
        return self.add_adapter(LoRAModel(adapter_id, self.dummy_rank, {}))

    def _forget(self, adapter_id: int) -> None:
        graphs.forget(adapter_id)
        if self.pairs is not None:
            self.pairs.release(adapter_id)

    def _add_adapter(self, lora: LoRAModel) -> None:
        """vLLM merges and pins its own weights here, layer by layer; there are none."""
        self._registered_adapters[lora.id] = lora

    def activate_adapter(self, lora_id: int) -> bool:
        """Give the adapter a slot: one copy of its bytes and one of its rows of the table, for all layers at once."""
        if lora_id in self._active_adapters:
            self._active_adapters.touch(lora_id)
            return False
        if len(self._active_adapters) >= self.lora_slots:
            self._evict(self._active_adapters.remove_oldest)
        slot, model = self.lora_index_to_id.index(None), self._registered_adapters[lora_id]
        packed: PackedAdapter | None = getattr(model, "scute", None)
        if packed is None:
            self.arena.mark(slot, model.rank)
            self.slots.hold(slot, lora_id, rank=model.rank, pair=-1, rotates=False, dummy=True)
        else:
            key = packed.pair_key
            pair = -1 if key is None or self.pairs is None else self.pairs.place_of(key)
            self.arena.write(slot, packed, pair)
            self.slots.hold(slot, lora_id, rank=packed.rank, pair=pair, rotates=packed.rotates)
        self._active_adapters[lora_id] = None
        self.lora_index_to_id[slot] = lora_id
        return True

    def _deactivate_adapter(self, lora_id: int) -> None:
        if lora_id in self.lora_index_to_id:
            slot = self.lora_index_to_id.index(lora_id)
            self.lora_index_to_id[slot] = None
            self.arena.release(slot)
            self.slots.release(slot)

    def registered_ids(self) -> set[int]:
        return set(self._registered_adapters.order)

    def is_active(self, adapter_id: int) -> bool:
        return adapter_id in self._active_adapters

    def is_pinned(self, adapter_id: int) -> bool:
        return adapter_id in self._active_adapters.pinned_items

    def take_evictions(self) -> Counter[int]:
        """How often each adapter lost its slot to another since the last call."""
        taken, self._evictions = self._evictions, Counter()
        return taken

    def touch(self, adapter_id: int) -> None:
        """Say that the adapter is in use, so that it is not the next to be evicted."""
        self._registered_adapters.touch(adapter_id)
        self._active_adapters.touch(adapter_id)

    def remove_oldest_adapter(self) -> bool:
        """Where vLLM's cache of adapters is full: what it drops loses its slot too, but stays in the host store."""
        return bool(self._evict(super().remove_oldest_adapter))

    def _evict(self, remove: Callable[[], Any]) -> Any:
        active = set(self._active_adapters.order)
        result = remove()
        self._evictions.update(active.difference(self._active_adapters.order))
        if len(self._evictions) > MOST_NAMED:  # where nobody asks
            self._evictions = Counter({BASE_ID: self._evictions.total()})
        return result

    def set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        """Plan a step. vLLM's compares tuples and then prepares the metadata of its own kernels.

        Raises LookupError if a row's adapter has no slot.
        """
        if mapping.type != LoRAMappingType.LANGUAGE:
            return
        ids = np.asarray(mapping.index_mapping, dtype=np.int64)
        if self._has_other_layers:  # experts and heads, whose own slots stay empty, ask vLLM's metadata
            prompts = np.asarray(mapping.prompt_mapping)
            rows = tuple(ids.tolist()), tuple(prompts.tolist())
            super().set_adapter_mapping(LoRAMapping(*rows, mapping.is_prefill, mapping.type))
        if self._is_planned(ids):
            return
        slots, has_dummy = self.slots.find(ids)
        self.plan.update(slots, self.slots.residents, force_routes=has_dummy)
        self._planned = self.slots.version, ids

    def _is_planned(self, ids: np.ndarray) -> bool:
        """Whether the plan on the device is the one of these rows: decoding repeats it for many steps."""
        if self._planned is None:
            return False
        version, planned_ids = self._planned
        return version == self.slots.version and np.array_equal(planned_ids, ids)

    def force_routes(self, *, shared: bool, rotation: bool) -> None:
        """Make the routes of the current plan live or not, for a graph that is captured with them."""
        for route, is_live in ((Route.SHARED, shared), (Route.ROTATION, rotation)):
            self.plan.live[route] = UNBOUNDED if is_live else 0
        self._planned = None

    def remove_all_adapters(self) -> None:
        super().remove_all_adapters()
        self.arena.clear()
        self.slots.clear()


def _mib(units: int) -> str:
    return f"{units * UNIT_BYTES / 2**20:,.2f}"
