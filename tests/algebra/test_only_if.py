"""The "only if" of Proposition A1: on random members of Table 1, no member with a live slot at the identity is equal.

Two members are equal only if their updates are. The candidate may differ from the member in what the adapter owns,
and its terms have rank at most r; so the difference of the parts that the slot sets would have to have a rank that
the terms can express. Here its singular values show that it has more. F is the member, F' any candidate.
"""

from dataclasses import replace

import pytest
import torch

from scute.algebra import Bias, Member, Owner, Rotation, SharedPair, Term, evaluate, fold, live_slots, ssf, update

IN, OUT, RANK = 40, 32, 3
SEEDS = range(8)


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)


def surely_above(matrix, rank):
    """Whether the matrix is far from every matrix of that rank: the next singular value is not small."""
    values = torch.linalg.svdvals(matrix)
    return bool(values[rank] > 1e-3 * values[0])


def vera(random):
    pair = SharedPair("pair", random(IN, RANK), random(RANK, OUT))
    return Member(terms=(Term(pair.a, pair.b, 1.0, random(RANK), random(OUT), Owner.SHARED, Owner.SHARED, pair),))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", ["DoRA", "(IA)3", "SSF"])
def test_the_scale_does_not_fold(seed, method):
    random = tensors(seed)
    weight, scale = random(IN, OUT), random(OUT)
    member = {
        "DoRA": Member(scale=scale, terms=(Term(random(IN, RANK), random(RANK, OUT), e=scale),)),
        "(IA)3": Member(scale=scale, bias=Bias(scaled=True)),
        "SSF": ssf(scale, random(OUT)),
    }[method]
    assert "s" in live_slots(fold(member)[0])
    # F = F' reads W diag(s - 1) = M' - M, whose rank is at most 2 r.
    assert surely_above(weight * (scale - 1), 2 * member.rank)
    # And F' with s = 1 has an update of rank at most r, whatever it owns.
    assert surely_above(update(member, weight), member.rank)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_shift_does_not_fold(seed):
    random = tensors(seed)
    member, weight = ssf(random(OUT), random(OUT)), random(IN, OUT)
    at_zero = torch.zeros(1, IN, dtype=torch.float64)
    # Every member without b is 0 where x is 0, and F is not.
    assert torch.equal(evaluate(member, at_zero, weight, None)[0], member.bias.shift)
    candidate = replace(member, bias=Bias(scaled=True))
    assert not evaluate(candidate, at_zero, weight, None).any()
    assert live_slots(fold(member)[0]) == ("s", "b")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("out", [OUT, 12], ids=["wide", "more inputs than outputs"])
def test_the_rotation_does_not_fold(seed, out):
    random = tensors(seed)
    member, weight = Member(rotation=Rotation(random(10, 4, 4))), random(IN, out)
    # R is all that the adapter owns, so F' is W itself. The rows of W that a block mixes are independent, so
    # (R - I) W is zero there only if R is the identity.
    blocks = member.rotation.blocks - torch.eye(4, dtype=torch.float64)
    changes = update(member, weight).reshape(10, 4, out)
    for block, rows, change in zip(blocks, weight.reshape(10, 4, out), changes, strict=True):
        assert surely_above(rows, 3)
        assert change.norm() >= torch.linalg.svdvals(rows)[3] * block.norm() > 0
    assert live_slots(fold(member)[0]) == ("R",)


@pytest.mark.parametrize("seed", SEEDS)
def test_e_does_not_fold_into_a_shared_b(seed):
    member = vera(tensors(seed))
    (term,) = member.terms
    # With e = 1 every row of M' is in the row space of B. Away from that space M still has its whole rank.
    basis = torch.linalg.qr(term.b.T)[0]
    outside = update(member, torch.zeros(IN, OUT, dtype=torch.float64)) @ (torch.eye(OUT) - basis @ basis.T)
    assert surely_above(outside, RANK - 1)
    assert "e" in live_slots(fold(member)[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_d_does_not_fold_into_shared_factors(seed):
    member = vera(tensors(seed))
    (term,) = member.terms
    # A has full column rank, so c d_i b_ij e_j = c' b_ij e'_j for all i and j: (d ⊗ e) ⊘ (1 ⊗ e') is constant in i.
    rows = torch.linalg.pinv(term.a) @ update(member, torch.zeros(IN, OUT, dtype=torch.float64)) / term.b
    torch.testing.assert_close(rows, torch.outer(term.d, term.e))
    ratios = rows / rows[0]
    assert (ratios.std(dim=0) > 1e-3).all()
    assert "d" in live_slots(fold(member)[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_an_owned_neighbour_is_the_difference(seed):
    random = tensors(seed)
    member = vera(random)
    (term,) = member.terms
    owned = Member(terms=(replace(term, a_owner=Owner.ADAPTER, b_owner=Owner.ADAPTER, pair=None),))
    folded = fold(owned)[0]
    assert live_slots(folded) == ()
    torch.testing.assert_close(update(folded, random(IN, OUT)), update(member, random(IN, OUT)))
