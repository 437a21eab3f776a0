"""DoRA's scale from tensor-parallel shards against the scale from the whole weight (paper, appendix E)."""

import numpy as np
import pytest
import torch

from scute.algebra.form import Member, Term
from scute.engine.weights import square_sums

IN, OUT, RANK = 576, 384, 9


@pytest.fixture
def layer() -> tuple[torch.Tensor, Member]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    member = Member(magnitude=draw(OUT).abs(), terms=(Term(draw(IN, RANK), draw(RANK, OUT), c=0.37),))
    return draw(OUT, IN).bfloat16(), member


def scale(sums: torch.Tensor, member: Member) -> np.ndarray:
    resolved = member.resolve_magnitude(sums.sqrt())
    return resolved.scale.float().numpy()


def part(member: Member, inputs: slice, outputs: slice) -> Member:
    (term,) = member.terms
    return Member(magnitude=member.magnitude[outputs], terms=(Term(term.a[inputs], term.b[:, outputs], c=term.c),))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_column_parallel_is_bit_equal(layer, ranks: int):
    weight, member = layer
    whole = scale(square_sums(weight, member), member)
    shards = [slice(i * OUT // ranks, (i + 1) * OUT // ranks) for i in range(ranks)]
    split = [
        scale(square_sums(weight[rows], part(member, slice(None), rows)), part(member, slice(None), rows))
        for rows in shards
    ]
    assert np.array_equal(np.concatenate(split), whole)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_row_parallel_is_within_four_units_in_the_last_place(layer, ranks: int):
    weight, member = layer
    whole = scale(square_sums(weight, member), member)
    shards = [slice(i * IN // ranks, (i + 1) * IN // ranks) for i in range(ranks)]
    sums = sum(square_sums(weight[:, columns], part(member, columns, slice(None))) for columns in shards)
    assert np.abs(scale(sums, member) - whole).max() <= (4 * np.spacing(np.abs(whole))).max()
    assert np.all(np.abs(scale(sums, member) - whole) <= 4 * np.spacing(np.abs(whole)))


def test_the_scale_is_peft_s(layer):
    weight, member = layer
    (term,) = member.terms
    norms = torch.linalg.norm(weight.float() + term.c * (term.a @ term.b).T, dim=1)
    np.testing.assert_allclose(
        scale(square_sums(weight, member), member), (member.magnitude / norms).numpy(), rtol=1e-6
    )
