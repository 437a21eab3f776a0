"""Members are on the CPU wherever the model is. Torch's meta device mixes with the CPU as little as a GPU does."""

import pytest
import torch

from scute.algebra import Bias, Member, Owner, Rotation, SharedPair, Term, evaluate, update

META = torch.device("meta")
PAIR = SharedPair("key", torch.ones(8, 2), torch.ones(2, 6))
ONES = torch.ones(6)
MEMBERS = {
    "DoRA": Member(magnitude=ONES, terms=(Term(torch.ones(8, 2), torch.ones(2, 6), 2.0),)),
    "(IA)3": Member(scale=ONES, bias=Bias(scaled=True)),
    "every bias": Member(scale=ONES, bias=Bias(True, ONES, ONES, ONES)),
    "VeRA": Member(terms=(Term(PAIR.a, PAIR.b, 1.0, torch.ones(2), ONES, Owner.SHARED, Owner.SHARED, PAIR),)),
    "OFT": Member(Rotation(torch.ones(2, 4, 4)), bias=Bias(shift=ONES)),
}


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("base_bias", [None, torch.ones(6, device=META)], ids=["no bias", "bias"])
def test_a_model_that_is_elsewhere(name, base_bias):
    weight, x = torch.ones(8, 6, device=META), torch.ones(3, 8, device=META)
    assert evaluate(MEMBERS[name], x, weight, base_bias).device == META
    assert update(MEMBERS[name], weight).device == META
