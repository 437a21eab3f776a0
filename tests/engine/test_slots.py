"""The slots on the host, the shared pairs and the host store, without an engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from scute.admission.memory import GIB
from scute.algebra.form import SharedPair
from scute.engine.base import base_model_of
from scute.engine.packing import PackedAdapter, lay_out
from scute.engine.pairs import SharedPairs
from scute.engine.slots import ActiveSlots
from scute.engine.store import HostStore
from scute.errors import Code, Refusal

MANY = 1040


@pytest.fixture
def slots() -> ActiveSlots:
    return ActiveSlots(MANY, np.zeros(2, dtype=np.int32))


def test_rows_find_their_slots(slots):
    """Ids come in any order and size; a request's rows follow one another."""
    slots.hold(5, 2**40, rank=8, pair=-1, rotates=False)
    slots.hold(0, 7, rank=0, pair=1, rotates=True)
    slots.hold(1039, 9, rank=1, pair=-1, rotates=False)
    found, has_dummy = slots.find(np.array([7, 7, 0, 2**40, 2**40, 2**40, 9, 0, 7]))
    assert found.tolist() == [0, 0, -1, 5, 5, 5, 1039, -1, 0]
    assert not has_dummy
    residents = slots.residents
    assert (residents.rank[5], residents.pair[0], residents.rotated[0]) == (8, 1, True)
    assert residents.rank.sum() == 9
    assert residents.pair.sum() == 1 - (MANY - 1)


def test_base_rows_alone(slots):
    assert slots.find(np.zeros(3, dtype=np.int64))[0].tolist() == [-1, -1, -1]
    assert slots.find(np.zeros(0, dtype=np.int64))[0].tolist() == []


@pytest.mark.parametrize("unknown", [1, 4, 6, 2**40])
def test_a_row_of_an_unknown_adapter_is_never_a_base_row(slots, unknown: int):
    slots.hold(0, 5, rank=1, pair=-1, rotates=False)
    slots.hold(1, 4, rank=1, pair=-1, rotates=False)
    slots.release(1)
    with pytest.raises(LookupError, match=f"adapter {unknown} "):
        slots.find(np.array([0, 5, unknown]))


def test_a_released_slot_holds_nothing(slots):
    slots.hold(3, 5, rank=8, pair=1, rotates=True, dummy=True)
    assert slots.find(np.array([5, 0]))[1]
    slots.release(3)
    slots.hold(4, 6, rank=8, pair=1, rotates=True, dummy=True)
    slots.clear()
    residents = slots.residents
    assert not residents.rank.any()
    assert (residents.pair == -1).all()
    assert not residents.rotated.any()
    assert not slots.find(np.array([0]))[1]


def test_every_change_is_counted(slots):
    versions = [slots.version]
    slots.hold(0, 1, rank=1, pair=-1, rotates=False)
    versions.append(slots.version)
    slots.find(np.array([1]))
    assert slots.version == versions[-1]
    slots.release(0)
    versions.append(slots.version)
    slots.clear()
    assert len({*versions, slots.version}) == 4


def pair(key: str, rank: int = 5, in_features: int = 6, out: int = 4) -> SharedPair:
    value = float(ord(key))
    return SharedPair(key, torch.full((in_features, rank), value), torch.full((rank, out), value))


@pytest.fixture
def pairs() -> SharedPairs:
    return SharedPairs(2, 5, max_in=6, max_out=4, dtype=torch.float32, device=torch.device("cpu"))


def test_a_pair_is_resident_once(pairs):
    for adapter in [1, 2, 1]:
        pairs.acquire(pair("x"), adapter)
    pairs.acquire(pair("y", rank=3), 3)
    assert [pairs.place_of("x"), pairs.place_of("y")] == [0, 1]
    assert pairs.rank.tolist() == pairs.host_rank.tolist() == [5, 3]
    assert (pairs.a[0] == ord("x")).all()
    assert (pairs.b[1, :3] == ord("y")).all()
    assert not pairs.a[1, 3:].any()


def test_pairs_are_restored_where_the_device_has_lost_them(pairs):
    """As a sleep of level 2 does."""
    pairs.acquire(pair("x"), 1)
    pairs.acquire(pair("y", rank=3), 2)
    before = pairs.a.clone(), pairs.b.clone(), pairs.rank.clone()
    for tensor in (pairs.a, pairs.b, pairs.rank):
        tensor.fill_(77)
    pairs.restore()
    after = pairs.a[0], pairs.a[1, :3], pairs.b[0], pairs.b[1, :3], pairs.rank
    wanted = before[0][0], before[0][1, :3], before[1][0], before[1][1, :3], before[2]
    assert all(torch.equal(one, two) for one, two in zip(after, wanted, strict=True))


def test_a_place_is_free_once_its_last_adapter_goes(pairs):
    for adapter, key in enumerate("xxy"):
        pairs.acquire(pair(key), adapter)
    assert pairs.has_room_for(pair("x"), 9)
    assert not pairs.has_room_for(pair("z"), 9)
    pairs.release(0)
    assert not pairs.has_room_for(pair("z"), 9)
    pairs.release(1)
    pairs.release(1)
    pairs.release(77)
    assert pairs.has_room_for(pair("z"), 9)
    pairs.acquire(pair("z", rank=2), 9)
    assert pairs.place_of("z") == 0
    assert pairs.place_of("y") == 1
    assert (pairs.rank[0], pairs.a[0, 0, 0]) == (2, ord("z"))
    with pytest.raises(ValueError, match="not in list"):
        pairs.place_of("x")


def test_what_an_adapter_holds_alone_is_free_for_what_replaces_it(pairs):
    for adapter, key in enumerate("xxy"):
        pairs.acquire(pair(key), adapter)
    assert pairs.has_room_for(pair("z"), 2)
    assert not pairs.has_room_for(pair("z"), 1)


def test_a_pair_without_users_is_still_there_until_its_place_is_needed(pairs):
    pairs.acquire(pair("x"), 1)
    pairs.release(1)
    pairs.acquire(pair("x"), 2)
    assert pairs.place_of("x") == 0
    pairs.acquire(pair("y"), 3)
    assert not pairs.has_room_for(pair("z"), 9)


@pytest.mark.parametrize(
    ("too_large", "code"),
    [
        (pair("x", rank=6), Code.CAPACITY_SHARED),
        (pair("x", in_features=7), Code.TENSOR_SHAPE),
        (pair("x", out=5), Code.TENSOR_SHAPE),
    ],
)
def test_a_pair_that_is_too_large(pairs, too_large: SharedPair, code: Code):
    pairs.check_fits(pair("x"))
    with pytest.raises(Refusal) as refusal:
        pairs.check_fits(too_large)
    assert refusal.value.code is code


class Store:
    """A host store of 100 bytes, with what it dropped."""

    def __init__(self) -> None:
        self.dropped: list[int] = []
        self.store = HostStore(100 / GIB, self.dropped.append)

    def put(self, adapter: int, size: int, path: str = "/a", **fields: Any) -> PackedAdapter:
        self.store.check_fits(adapter, size)
        packed = PackedAdapter("LoRA", *lay_out({}, 0, pinned=False), None, size, **fields)
        self.store.put(adapter, path, packed)
        return packed


@pytest.fixture
def host() -> Store:
    return Store()


def test_an_adapter_comes_back_by_id_and_path(host):
    packed = host.put(1, 10)
    assert host.store.get(1, "/a") is packed
    assert host.store.get(1, "/b") is None
    assert host.store.get(2, "/a") is None


def test_an_adapter_beyond_the_budget_is_refused_and_none_is_dropped(host):
    host.put(1, 60)
    host.put(2, 40)
    with pytest.raises(Refusal) as refusal:
        host.put(3, 1)
    assert refusal.value.code is Code.CAPACITY_HOST
    assert host.dropped == []
    host.store.drop(1)
    host.put(3, 60)


def test_a_replacement_counts_once(host):
    host.put(1, 90)
    packed = host.put(1, 60, path="/b")
    host.put(2, 40)
    assert host.dropped == []
    assert host.store.get(1, "/b") is packed
    assert host.store.get(1, "/a") is None


def test_drop_tells_once(host):
    for adapter in [1, 2, 3]:
        host.put(adapter, 10)
    for adapter in [2, 2, 77]:
        host.store.drop(adapter)
    assert host.dropped == [2]
    assert host.store.get(2, "/a") is None


def test_folders_that_need_base_weights(host):
    host.put(1, 10, path="/a")
    assert host.store.paths_needing_base_weights() == []
    host.put(2, 10, path="/b", needs_base_weights=True)
    host.put(3, 10, path="/c")
    assert host.store.paths_needing_base_weights() == [(2, "/b")]


def test_a_redrawn_pair_goes_through_the_dtype_that_is_served():
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.dtype = torch.bfloat16
    served = SimpleNamespace(hf_config=config, dtype=torch.float32, model="a-model-of-no-folder", revision=None)
    assert base_model_of(served).dtype is torch.float32
