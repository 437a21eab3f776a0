"""Bytes of every piece and route, held against the tensors themselves, the engine's layout and the propositions."""

from types import SimpleNamespace

import pytest
import torch

from scute.admission import BaseModel, compile_adapter
from scute.admission.description import describe
from scute.algebra import Member
from scute.costs import Counting, LayerShape, Slots, Tenant, layer_bytes, pair_bytes, read_base, read_tenant, spread
from scute.costs.outside import OUTSIDE, carried_scale, rotation_pass
from scute.costs.slots import Piece
from scute.costs.tenant import STOCK_RANKS, stock_rank
from scute.costs.traffic import Route, live_routes
from scute.engine.options import Options
from scute.engine.packing import lay_out, pack
from scute.engine.pairs import SharedPairs
from scute.testing.adapters import AMPLIFIED, write_adapter
from scute.testing.oracle import load_base
from scute.testing.tiny import tiny_llama, tiny_qwen2

SHAPE = LayerShape("qkv", 64, (48, 16))
FLOAT32 = Counting(factor=4, vector=4)
HALF = Counting(factor=2, vector=4)


@pytest.fixture(scope="module", params=[tiny_llama, tiny_qwen2], ids=["llama", "qwen2"])
def base(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(base):
    return load_base(base)


def resolved(member: Member) -> Member:
    """What an engine has of it once it knows the base weight's norms."""
    return member if member.magnitude is None else member.resolve_magnitude(torch.full_like(member.magnitude, 0.5))


@pytest.mark.parametrize("name", AMPLIFIED)
def test_bytes_of_a_tenant_are_those_of_its_tensors(base, model, tmp_path, name):
    sizes, admitted = read_base(base)
    form = compile_adapter(write_adapter(model, name, tmp_path), admitted)
    tenant = Tenant.of(form, sizes, name)
    biases = {module: module_of.bias for module, module_of in model.named_modules() if module in form.members}

    packed, index = {}, 0
    for layer, _ in zip(sizes.layers, tenant.slots, strict=True):
        for place, module in enumerate(layer.modules):
            if module in form.members:
                member = resolved(form.members[module])
                packed[index] = pack(wrapped(layer, place, biases), place, member, torch.float16, Options())
            index += 1
    total = sum(len(layer.shape.slices) for layer in sizes.layers)
    buffer, _ = lay_out(packed, total, pinned=False)
    in_tensors = sum(tensor.nbytes for piece in packed.values() for _, tensor in piece.pieces())

    assert tenant.owned(sizes.layers, HALF).total() == in_tensors
    assert tenant.owned(sizes.layers, HALF, in_arena=True).total() == buffer.numel()
    shift = tenant.owned(sizes.layers, FLOAT32)[Piece.SHIFT]  # of DoRA beside a base bias; in no file
    terms = [term for member in form.members.values() for term in member.terms if term.pair is None]
    folded = sum(term.d.nbytes for term in terms if term.d is not None)  # of AdaLoRA, into A
    assert tenant.owned(sizes.layers, FLOAT32).total() - shift == describe(form).owned_bytes - folded


@pytest.mark.parametrize("name", ["vera", "vera-regenerated", "oft"])
def test_bytes_of_a_pair_are_those_of_its_place(base, model, name, tmp_path):
    """The widest layers decide, though vera-regenerated is on narrow ones only; engine/model_manager.py makes it so."""
    sizes, admitted = read_base(base)
    tenant = Tenant.of(compile_adapter(write_adapter(model, name, tmp_path), admitted), sizes, name)
    widest_in = max(p.in_features for m, p in admitted.projections.items() if m != "lm_head")
    widest_out = max(p.out_features for m, p in admitted.projections.items() if m != "lm_head")
    place = SharedPairs(1, 256, widest_in, widest_out, torch.float32, torch.device("meta"))
    expected = 0 if name == "oft" else place.a.nbytes + place.b.nbytes
    assert pair_bytes([tenant, tenant], sizes) == expected


@pytest.mark.parametrize("name", AMPLIFIED)
def test_headers_are_enough_but_for_pairs(base, model, name, tmp_path):
    sizes, admitted = read_base(base)
    folders = [write_adapter(model, name, tmp_path / each) for each in ("one", "two")]
    one, two = (read_tenant(folder, sizes, admitted) for folder in folders)
    assert one.slots == two.slots == Tenant.of(compile_adapter(folders[0], admitted), sizes, "").slots
    if AMPLIFIED[name].method == "VeRA":
        other = write_adapter(model, name, tmp_path / "other", projection_prng_key=77)
        assert pair_bytes([one, two], sizes) == pair_bytes([one], sizes)
        assert pair_bytes([one, read_tenant(other, sizes, admitted)], sizes) == 2 * pair_bytes([one], sizes)


def wrapped(layer, place, biases):
    """As much of vLLM's layer as packing reads: the widths of the slices, and the base bias."""
    own = [biases.get(module) for module in layer.modules]
    bias = None
    if own[place] is not None:
        slices = zip(own, layer.shape.slices, strict=True)
        bias = torch.cat([torch.zeros(out) if b is None else b.detach() for b, out in slices])
    return SimpleNamespace(
        base_layer=SimpleNamespace(bias=bias, skip_bias_add=False, input_size=layer.shape.in_features),
        output_slices=layer.shape.slices,
        input_size=layer.shape.in_features,
        tp_rank=0,
    )


def test_weights_and_cache_of_the_base(base, model):
    sizes, _ = read_base(base)
    assert sizes.weight_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert sizes.kv_token_bytes == 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, width, float32


def test_a_projection_outside_the_layers_is_told(base):
    sizes, admitted = read_base(base)
    form = SimpleNamespace(method="LoRA", members={"lm_head": Member()})
    with pytest.raises(ValueError, match="lm_head"):
        Tenant.of(form, sizes, "head")
    assert isinstance(admitted, BaseModel)


@pytest.mark.parametrize("counting", [Counting(activations=False), Counting(2, 2, False)])
def test_propositions(counting):
    scale = [((Slots(scale=True), None), 3)] * 5
    assert layer_bytes(SHAPE, scale, counting).total() == carried_scale(5, 48, counting.vector)
    shared = [((Slots(pair="p", shared_rank=8), None), 1)] * 5
    pair = counting.factor * 8 * (64 + 48)
    assert layer_bytes(SHAPE, shared, counting).total() == pair + counting.vector * 5 * (8 + 48)
    other = [((Slots(pair="q", shared_rank=8), None), 1)]
    assert layer_bytes(SHAPE, shared + other, counting).total() == 2 * pair + counting.vector * 6 * (8 + 48)


def test_a_rotation_moves_what_its_proposition_says():
    rotated = [((Slots(rotation_width=4), None), 3)] * 5
    assert layer_bytes(SHAPE, rotated, Counting()).total() == rotation_pass(5, 15, 64, 4)


def test_a_conversion_costs_the_same_on_every_row_count():
    lora = [((Slots(rank=8), Slots(rank=8)), 1)]
    few, many = (layer_bytes(SHAPE, [(s, n) for s, _ in lora], Counting(activations=False)) for n in (1, 4096))
    assert few == many == {Route.LOW_RANK: 2 * 8 * (2 * 64 + 64)}


def test_passes_outside_the_expand():
    assert {name: (p.bytes_moved(10, 6), p.launches) for name, p in OUTSIDE.items()} == {
        "side kernel": (240, 1),
        "gathered scale": (240, 1),
        "index scale": (480, 2),
        "vLLM outside": (480, 3),
    }


def test_live_routes_are_those_of_adapters_with_rows():
    uses = [((Slots(rank=4), None), 0), ((None, Slots(scale=True, rotation_width=2)), 1)]
    assert live_routes(uses) == {Route.SCALE, Route.ROTATION}


def test_stock_pads_as_vllm_does():
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == STOCK_RANKS
    loras = [Tenant("", "LoRA", ((Slots(rank=rank), None),)) for rank in (3, 17)]
    assert stock_rank(loras) == 32
    assert loras[0].padded(32).slots == ((Slots(rank=32), Slots(rank=32)),)
    with pytest.raises(ValueError, match="513"):
        stock_rank([Tenant("", "LoRA", ((Slots(rank=513),),))])


def test_rows_are_spread():
    assert spread(7, 3) == [3, 2, 2]
    assert spread(2, 3) == [1, 1, 0]
