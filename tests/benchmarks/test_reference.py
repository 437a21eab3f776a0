"""Tenants are folders of the PEFT library, and the layer-by-layer reference is that library on the whole model."""

import pytest
import torch
from serving.models import column_norms, shape, write_base
from serving.reference import BASE, Reference
from serving.tenants import KINDS, Writer

from scute.agreement import mean_difference
from scute.testing.oracle import Oracle

SEQUENCES = torch.randint(3, 256, (2, 12), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "base", shape("tiny"), torch.float32, "cpu")


@pytest.fixture(scope="module")
def folders(base):
    writer = Writer(base, "cpu")
    names = [f"{kind}.{number}" for kind in KINDS if kind != "lora-r256" and "as" not in kind for number in (0, 1)]
    return {name: writer.write(name, base.parent / name) for name in names}


def test_layer_by_layer_is_the_whole_model(base, folders):
    oracle = Oracle(base)
    scores = Reference(base, "cpu").logprobs(SEQUENCES, folders)
    torch.testing.assert_close(list(scores[BASE]), oracle.logprobs(SEQUENCES), atol=2e-6, rtol=0)
    for name, folder in folders.items():
        torch.testing.assert_close(list(scores[name]), oracle.logprobs(SEQUENCES, folder), atol=5e-6, rtol=0)


def test_every_tenant_has_an_effect_of_its_own(base, folders):
    scores = Reference(base, "cpu").logprobs(SEQUENCES, folders)
    for name, values in scores.items():
        for other, others in scores.items():
            if name < other:
                assert mean_difference(list(values), list(others)) > 0.1, (name, other)


def test_the_norms_are_those_of_the_columns(base):
    model = Oracle(base).base
    for name, norm in column_norms(base).items():
        torch.testing.assert_close(norm, model.get_submodule(name).weight.norm(dim=1))
