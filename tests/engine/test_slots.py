"""The slot buffers, the shared pairs and the host store, without an engine."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from scute.algebra.form import SharedPair
from scute.engine.base import base_model_of
from scute.engine.layers import ScuteLinear
from scute.engine.packing import PackedAdapter
from scute.engine.slots import LayerSlots, SharedPairs, Sizes, SliceSlots
from scute.engine.store import GIB, HostStore
from scute.errors import Code, Refusal
from scute.kernels.routes import Flag

SIZES = Sizes(slots=3, max_rank=4, rotation_width=2, shared_rank=5, dtype=torch.float32, device=torch.device("cpu"))
IN, SLICES = 6, (4, 2)


@pytest.fixture
def layer() -> LayerSlots:
    return LayerSlots(SIZES, IN, SLICES, has_shared=True)


def full(out: int, value: float) -> SliceSlots:
    """A piece that has every part, each filled with the value."""
    return SliceSlots(
        a=torch.full((3, IN), value),
        b=torch.full((3, out), value),
        scale=torch.full((out,), value),
        shift=torch.full((out,), value),
        d=torch.full((5,), value),
        e=torch.full((out,), value),
        rotation=torch.full((IN * 2,), value),
        width=2,
    )


def test_an_unused_layer_is_the_identity(layer):
    assert not layer.table.any()
    assert not layer.width.any()


def test_a_piece_lands_in_its_slot_and_slice(layer):
    layer.write(1, [full(4, 7.0), full(2, 8.0)])
    every = Flag.SCALE | Flag.SHIFT | Flag.SHARED | Flag.ROTATION
    assert layer.table.tolist() == [[[0, 0]] * 2, [[3, every]] * 2, [[0, 0]] * 2]
    assert layer.width.tolist() == [[0, 0], [2, 2], [0, 0]]
    for index, (columns, value) in enumerate([(slice(0, 4), 7.0), (slice(4, 6), 8.0)]):
        rows = slice(4, 7)
        assert (layer.a[index, rows] == value).all()
        for slots in [layer.b[rows], layer.scale[1:2], layer.shift[1:2], layer.e[1:2]]:
            assert (slots[:, columns] == value).all()
        assert (layer.d[1, index] == value).all()
        assert (layer.rotation[1, index] == value).all()
    for slot in [0, 2]:
        rows = slice(4 * slot, 4 * slot + 4)
        assert not layer.a[:, rows].any()
        assert not layer.b[rows].any()
        for slots in [layer.scale, layer.shift, layer.d, layer.e, layer.rotation]:
            assert not slots[slot].any()


@pytest.mark.parametrize(
    ("piece", "entry"),
    [
        (SliceSlots(), (0, 0)),
        (SliceSlots(a=torch.ones(2, IN), b=torch.ones(2, 4)), (2, 0)),
        (SliceSlots(scale=torch.ones(4)), (0, Flag.SCALE)),
        (SliceSlots(shift=torch.ones(4)), (0, Flag.SHIFT)),
        (SliceSlots(d=torch.ones(5), e=torch.ones(4)), (0, Flag.SHARED)),
        (SliceSlots(rotation=torch.ones(IN), width=1), (0, Flag.ROTATION)),
        (None, (0, 0)),
    ],
)
def test_the_next_adapter_leaves_nothing_of_the_last(layer, piece: SliceSlots | None, entry: tuple[int, int]):
    """The buffers may keep old values; the table must not let a kernel read them."""
    layer.write(1, [full(4, 7.0), full(2, 7.0)])
    layer.write(1, [piece, None])
    assert layer.table[1].tolist() == [list(entry), [0, 0]]
    assert layer.width[1].tolist() == [0 if piece is None else piece.width, 0]


def test_clear_makes_one_slot_the_identity(layer):
    layer.write(0, [full(4, 1.0), full(2, 1.0)])
    layer.write(1, [full(4, 2.0), None])
    layer.clear(0)
    assert not layer.table[0].any()
    assert not layer.width[0].any()
    assert layer.table[1, 0].any()


def test_buffers_never_move(layer):
    """CUDA graphs hold their addresses."""
    tensors = [t for t in vars(layer).values() if isinstance(t, torch.Tensor)]
    before = [t.data_ptr() for t in tensors]
    for value in [1.0, 2.0]:
        layer.write(0, [full(4, value), full(2, value)])
        layer.clear(0)
    assert before == [t.data_ptr() for t in vars(layer).values() if isinstance(t, torch.Tensor)]


def pair(key: str, rank: int = 5, in_features: int = 6, out: int = 4) -> SharedPair:
    value = float(ord(key))
    return SharedPair(key, torch.full((in_features, rank), value), torch.full((rank, out), value))


@pytest.fixture
def pairs() -> SharedPairs:
    return SharedPairs(SIZES, 2, max_in=6, max_out=4)


def test_a_pair_is_resident_once(pairs):
    for adapter in [1, 2, 1]:
        pairs.acquire(pair("x"), adapter)
    pairs.acquire(pair("y", rank=3), 3)
    assert [pairs.place_of("x"), pairs.place_of("y")] == [0, 1]
    assert pairs.rank.tolist() == [5, 3]
    assert (pairs.a[0] == ord("x")).all()
    assert (pairs.b[1, :3] == ord("y")).all()
    assert not pairs.a[1, 3:].any()


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

    def put(self, adapter: int, size: int, path: str = "/a", method: str = "LoRA") -> PackedAdapter:
        self.store.check_fits(adapter, size)
        packed = PackedAdapter(method, {}, None, size)
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


def test_folders_of_one_method(host):
    host.put(1, 10, path="/a")
    host.put(2, 10, path="/b", method="DoRA")
    host.put(3, 10, path="/c")
    assert host.store.paths("LoRA") == [(1, "/a"), (3, "/c")]
    assert host.store.paths("DoRA") == [(2, "/b")]
    assert host.store.paths("VeRA") == []


def test_a_dummy_of_another_shard_s_size_sets_the_rank_alone(layer):
    """vLLM sizes its warm-up dummies by the shard, so they must not be cut again, nor copied."""
    layer.write(0, [full(4, 1.0), full(2, 1.0)])
    stub = SimpleNamespace(slots=layer)
    ScuteLinear.set_lora(stub, 0, [torch.zeros(2, 3), None], [torch.zeros(1, 2), None])
    assert layer.table[0].tolist() == [[2, 0], [2, 0]]
    ScuteLinear.set_lora(stub, 0, torch.empty(0, 1), torch.empty(1, 0))
    assert not layer.table[0].any()


def test_a_redrawn_pair_goes_through_the_dtype_that_is_served():
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.dtype = torch.bfloat16
    assert base_model_of(SimpleNamespace(hf_config=config, dtype=torch.float32)).dtype is torch.float32
