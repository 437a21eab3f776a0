"""Admission of one adapter on one rank: compile, place, resolve, fold, cast. The only step that may refuse."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed import get_pp_group, get_tp_group
from vllm.model_executor.models.utils import PPMissingLayer

from scute.admission.compiled.manifest import tensor_file
from scute.admission.methods.lora import MAX_RANK
from scute.admission.stacks import compile_stack, folders_of, naming
from scute.algebra.form import AdapterForm, Member, SharedPair
from scute.algebra.stack import stack, stacked_method, stacked_rank
from scute.engine import weights
from scute.engine.layers import ScuteLinear
from scute.engine.packing import PackedAdapter, lay_out, pack
from scute.engine.pieces import SliceSlots
from scute.engine.placement import Place, localize, splits_input
from scute.engine.sources import locate
from scute.errors import Code, Refusal

if TYPE_CHECKING:
    from scute.engine.model_manager import ScuteModelManager

LocalMembers = dict[str, list[Member | None]]


def admit(manager: "ScuteModelManager", adapter_id: int, path: str) -> PackedAdapter:
    """The adapter of a folder, or of a stack of them, ready to copy into this rank's arena.

    Collective under tensor parallelism: every rank admits the same adapters in the same order, and all of them
    refuse if one does. Raises Refusal.
    """
    with _AllOrNone() as agreement:
        folders = [locate(name, manager.options, fresh=False) for name in folders_of(path)]
        forms = compile_stack(folders, manager.base_model)
        placed, squares = [], []
        for number, form in enumerate(forms):
            with naming(folders, number):
                placed.append(_place(manager, form))
                squares.append(_square_sums(manager, placed[-1]))
        file_bytes = sum(tensor_file(folder).stat().st_size for folder in folders)
        agreement.succeed()
    _check_capacity(manager, adapter_id, forms)
    manager.store.check_fits(adapter_id, file_bytes)
    members = _stack([_resolve(each, _reduce(manager, own)) for each, own in zip(placed, squares, strict=True)])
    pair = _shared_pair(forms)
    with _AllOrNone() as agreement:
        buffer, entries = lay_out(_pack(manager, members), manager.num_slices, manager.pins_memory)
        pair_key = None if pair is None else pair.key
        packed = PackedAdapter(stacked_method(forms), buffer, entries, pair_key, file_bytes, _needs_base_weights(forms))
        _check_pair_finite(pair, manager.lora_config.lora_dtype)
        manager.check_device_memory(adapter_id, packed)
        agreement.succeed()
    if manager.pairs is not None:
        manager.pairs.release(adapter_id)  # held by what it replaces in place
        if pair is not None:
            manager.pairs.acquire(pair, adapter_id)
    return packed


def _check_capacity(manager: "ScuteModelManager", adapter_id: int, forms: Sequence[AdapterForm]) -> None:
    """Equal on every rank, so that all refuse alike."""
    rank, limit = stacked_rank(forms), manager.max_rank
    if rank > limit:
        sums = " (the ranks of a stack add up)" if len(forms) > 1 else ""
        remedy = "start vLLM with a larger --max-lora-rank, or without one"
        if limit == MAX_RANK:
            remedy = "no engine of Scute serves more; convert it with scute convert"
        raise Refusal(Code.CAPACITY_RANK, f"LoRA rank {rank} is greater than max_lora_rank {limit}{sums}; {remedy}.")
    pair = _shared_pair(forms)
    if pair is not None:
        manager.check_room_for(pair, adapter_id)


def _shared_pair(forms: Sequence[AdapterForm]) -> SharedPair | None:
    """The only one: a stack of two is refused."""
    members = [member for form in forms for member in form.members.values()]
    return next((t.pair for m in members for t in m.terms if t.pair is not None), None)


def _needs_base_weights(forms: Sequence[AdapterForm]) -> bool:
    return any(member.magnitude is not None for form in forms for member in form.members.values())


def _place(manager: "ScuteModelManager", form: AdapterForm) -> LocalMembers:
    """Members of the base model's projections to members of each wrapped layer's slices on this rank."""
    parts: dict[str, list[Member | None]] = {}
    for name, member in form.members.items():
        place = _find(manager, name, member)
        if place is not None:
            parts.setdefault(place.module, [None] * place.count)[place.index] = member
    return {module: _localize(module, manager.modules[module], members) for module, members in parts.items()}


def _localize(name: str, layer: Any, members: list[Member | None]) -> list[Member | None]:
    try:
        return localize(layer, members)
    except Refusal:
        raise
    except (
        ValueError,
        RuntimeError,
    ) as error:  # vLLM's own slicers, for fused layers that hold other parts than they have slices
        raise Refusal(Code.MODULE_UNSUPPORTED, f"its projections cannot be fused into {name}: {error}") from error


def _find(manager: "ScuteModelManager", name: str, member: Member) -> Place | None:
    """Place of a projection; None where another pipeline stage has it."""
    renamed = manager.engine_name(name)
    if manager.uses_mla and renamed.endswith(".kv_b_proj"):
        raise Refusal(
            Code.MODULE_UNSUPPORTED,
            f"it adapts {name}, which vLLM's latent attention absorbs into other weights; train it without that one.",
        )
    place = manager.places.get(renamed)
    if place is None:
        if manager.pipeline_parallel and _is_on_other_stage(manager.model, renamed):
            return None
        raise Refusal(
            Code.MODULE_UNSUPPORTED,
            f"it adapts {name}, which this engine does not adapt; check --lora-target-modules, or train the adapter "
            "without it.",
        )
    layer: Any = manager.modules[place.module]
    if not isinstance(layer, ScuteLinear):
        raise Refusal(
            Code.MODULE_UNSUPPORTED,
            f"it adapts {name}, a {type(layer).__name__} in this engine, where Scute serves nothing yet; train the "
            "adapter without it.",
        )
    if member.rotation is not None and not layer.rotation_width:
        raise Refusal(
            Code.CAPACITY_ROTATION,
            f"it transforms the input of {name}, which this engine has no room for; set rotation_width in "
            "additional_config['scute'] (a layer with a forward of its own cannot be served).",
        )
    if any(t.pair is not None for t in member.terms) and layer.pairs is None and manager.pairs is not None:
        raise Refusal(
            Code.MODULE_UNSUPPORTED,
            f"it has shared factors on {name}, whose shards are not one run of outputs; serve it without tensor "
            "parallelism.",
        )
    return place


def _is_on_other_stage(model: Any, name: str) -> bool:
    module = model
    for part in name.split("."):
        module = getattr(module, part, None)
        if isinstance(module, PPMissingLayer):
            return True
        if module is None:
            return False
    return False


def _square_sums(manager: "ScuteModelManager", members: LocalMembers) -> dict[tuple[str, int], Tensor]:
    """Square sums over this rank's inputs of every slice that has a magnitude, by (module, slice)."""
    sums = {}
    for module, local in members.items():
        if not any(m is not None and m.magnitude is not None for m in local):
            continue
        layer: Any = manager.modules[module]
        weight = weights.dense_weight(layer.base_layer)
        starts = layer.slice_starts
        for index, member in enumerate(local):
            if member is not None and member.magnitude is not None:
                sums[module, index] = weights.square_sums(weight[starts[index] : starts[index + 1]], member)
    return sums


def _reduce(manager: "ScuteModelManager", sums: dict[tuple[str, int], Tensor]) -> dict[tuple[str, int], Tensor]:
    """Add up the square sums of row-parallel layers over the ranks, in one all-reduce."""
    split = [key for key in sorted(sums) if splits_input(manager.modules[key[0]])]
    if not split:
        return sums
    flat = torch.cat([sums[key] for key in split])
    torch.distributed.all_reduce(flat, group=get_tp_group().cpu_group)
    reduced = flat.split([sums[key].numel() for key in split])
    return sums | dict(zip(split, reduced, strict=True))


def _resolve(members: LocalMembers, sums: dict[tuple[str, int], Tensor]) -> LocalMembers:
    """Put DoRA's scale in place of its magnitude."""
    resolved: LocalMembers = defaultdict(list)
    for module, local in members.items():
        for index, member in enumerate(local):
            if member is not None and member.magnitude is not None:
                member = member.resolve_magnitude(sums[module, index].sqrt())
            resolved[module].append(member)
    return dict(resolved)


def _stack(layers: Sequence[LocalMembers]) -> LocalMembers:
    """One member for every slice that several adapters of a stack adapt, the first applied first."""
    stacked: LocalMembers = {}
    for local in layers:
        for module, members in local.items():
            before = stacked.get(module, [None] * len(members))
            stacked[module] = [_on_top(one, two) for one, two in zip(before, members, strict=True)]
    return stacked


def _on_top(first: Member | None, second: Member | None) -> Member | None:
    if first is None or second is None:
        return second if first is None else first
    return stack(first, second)


def _pack(manager: "ScuteModelManager", members: LocalMembers) -> dict[int, SliceSlots]:
    """What the adapter puts into each slice, by the slice's place in the table."""
    dtype = manager.lora_config.lora_dtype
    slices = {}
    for module, local in members.items():
        layer: Any = manager.modules[module]
        for index, member in enumerate(local):
            if member is not None:
                piece = pack(layer, index, member, dtype, manager.options)
                _check_finite(module, piece)
                slices[layer.first_slice + index] = piece
    return slices


def _check_finite(module: str, piece: SliceSlots) -> None:
    """A value beyond the LoRA dtype, or a zero column under DoRA, must not reach other tenants' batches as NaN."""
    for field, tensor in piece.pieces():
        if not torch.isfinite(tensor).all():
            raise Refusal(
                Code.TENSOR_NOT_FINITE,
                f"slot {field.name.lower()} of {module} is not finite in {tensor.dtype}; serve with a --dtype that "
                "holds it, or check the adapter (a DoRA column whose weight is zero has no norm).",
            )


def _check_pair_finite(pair: SharedPair | None, dtype: torch.dtype) -> None:
    if pair is not None and not all(torch.isfinite(factor.to(dtype)).all() for factor in (pair.a, pair.b)):
        raise Refusal(Code.TENSOR_NOT_FINITE, f"its shared factors are not finite in {dtype}; check the adapter.")


class _AllOrNone:
    """Runs a step on every rank and pipeline stage, and fails on all of them if it failed on one."""

    def __enter__(self) -> "_AllOrNone":
        self._done = 0
        return self

    def succeed(self) -> None:
        self._done = 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        done = torch.tensor([self._done])
        for group in (get_tp_group(), get_pp_group()):
            if group.world_size > 1:
                torch.distributed.all_reduce(done, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        if error is None and not int(done):
            raise Refusal(Code.PEER_RANK_FAILED, "another rank of the engine could not admit it; its message says why.")
