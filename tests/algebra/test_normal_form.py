"""The rules of the normal form: folds, stacks and Table 1, on random members."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scute.algebra import (
    Bias,
    Member,
    Obstacle,
    Owner,
    Rotation,
    SharedPair,
    Term,
    column_norms,
    evaluate,
    fold,
    live_slots,
    obstacle,
    ssf,
    stack,
    table1,
)
from scute.algebra.evaluate import rotate
from scute.algebra.rotations import compose

IN, OUT, TOKENS = 6, 5, 3
few = settings(max_examples=40, deadline=None)
DTYPE = torch.float64


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, dtype=DTYPE, generator=generator)


@st.composite
def terms(draw, random):
    rank = draw(st.integers(1, 3))
    a, b = random(IN, rank), random(rank, OUT)
    a_owner, b_owner = draw(st.sampled_from([(p, q) for p in Owner for q in Owner]))
    shared = a_owner is b_owner is Owner.SHARED
    return Term(
        a=a,
        b=b,
        c=draw(st.sampled_from([1.0, 0.0, -2.5])),
        d=random(rank) if draw(st.booleans()) else None,
        e=random(OUT) if draw(st.booleans()) else None,
        a_owner=a_owner,
        b_owner=b_owner,
        pair=SharedPair("key", a, b) if shared else None,
    )


@st.composite
def members(draw, rotated=True, replaced=True):
    random = tensors(draw(st.integers(0, 2**31)))
    vector = lambda allowed=True: random(OUT) if allowed and draw(st.booleans()) else None  # noqa: E731
    return Member(
        rotation=Rotation(random(2, 3, 3)) if rotated and draw(st.booleans()) else None,
        scale=vector(),
        bias=Bias(draw(st.booleans()), vector(replaced), vector()),
        terms=tuple(draw(terms(random)) for _ in range(draw(st.integers(0, 2)))),
    )


@st.composite
def layers(draw):
    """x, W and the base bias, which may be None."""
    random = tensors(draw(st.integers(0, 2**31)))
    return random(TOKENS, IN), random(IN, OUT), random(OUT) if draw(st.booleans()) else None


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@few
@given(members(), layers())
def test_evaluate_is_the_formula(member, layer):
    x, weight, base_bias = layer
    rotation = torch.eye(IN, dtype=DTYPE) if member.rotation is None else torch.block_diag(*member.rotation.blocks)
    scale = torch.ones(OUT, dtype=DTYPE) if member.scale is None else member.scale
    own = torch.zeros(OUT, dtype=DTYPE) if base_bias is None else base_bias
    own = own if member.bias.replaced is None else member.bias.replaced
    expected = x @ rotation @ weight @ scale.diag() + own * (scale if member.bias.scaled else 1)
    expected = expected + (0 if member.bias.shift is None else member.bias.shift)
    for t in member.terms:
        d = torch.ones(t.rank, dtype=DTYPE) if t.d is None else t.d
        e = torch.ones(OUT, dtype=DTYPE) if t.e is None else t.e
        expected = expected + t.c * x @ t.a @ d.diag() @ t.b @ e.diag()
    close(evaluate(member, x, weight, base_bias), expected)


@few
@given(members(), layers())
def test_fold_preserves_the_function(member, layer):
    folded, _ = fold(member)
    close(evaluate(folded, *layer), evaluate(member, *layer))
    assert fold(folded)[0].terms == folded.terms


@few
@given(members())
def test_fold_leaves_what_the_rule_says(member):
    folded, folds = fold(member)
    for before, after in zip(member.terms, folded.terms, strict=True):
        owns_a, owns_b = before.a_owner is Owner.ADAPTER, before.b_owner is Owner.ADAPTER
        vectors = before.d is not None or before.e is not None
        assert (after.c == 1.0) == (before.c == 1.0 or owns_a or owns_b or vectors)
        assert (after.d is None) == (before.d is None or owns_a or owns_b)
        assert (after.e is None) == (before.e is None or owns_b)
        assert (after.a_owner, after.b_owner, after.pair) == (before.a_owner, before.b_owner, before.pair)
        assert owns_a or after.a is before.a
        assert owns_b or after.b is before.b
    assert (folded.rotation, folded.scale, folded.bias) == (member.rotation, member.scale, member.bias)
    stay = {record.slot for record in folds if record.into is None}
    assert stay == set(live_slots(folded))
    assert all(record.reason for record in folds)


@few
@given(members())
def test_fold_writes_into_nothing_it_was_given(member):
    given_tensors = [t for term in member.terms for t in (term.a, term.b, term.d, term.e) if t is not None]
    copies = [t.clone() for t in given_tensors]
    fold(member)
    assert all(torch.equal(t, copy) for t, copy in zip(given_tensors, copies, strict=True))


def test_fold_prefers_a_then_d_then_b_then_e():
    a, b, d, e = torch.ones(IN, 2), torch.ones(2, OUT), torch.ones(2), torch.ones(OUT)
    mine, theirs = Owner.ADAPTER, Owner.SHARED

    def into(term):
        return {record.slot: record.into for record in fold(Member(terms=(term,)))[1]}

    assert into(Term(a, b, 2.0, d, e, mine, mine)) == {"e": "B", "d": "A", "c": "A"}
    assert into(Term(a, b, 2.0, d, e, theirs, mine)) == {"e": "B", "d": "B", "c": "B"}
    assert into(Term(a, b, 2.0, d, e, mine, theirs)) == {"e": None, "d": "A", "c": "A"}
    assert into(Term(a, b, 2.0, d, e, theirs, theirs)) == {"e": None, "d": None, "c": "d"}
    assert into(Term(a, b, 2.0, None, e, theirs, theirs)) == {"e": None, "c": "e"}
    assert into(Term(a, b, 2.0, None, None, theirs, theirs)) == {"c": None}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fold_of_half_factors_does_not_overflow(dtype):
    big = torch.full((IN, 2), 60000.0, dtype=dtype)
    folded, _ = fold(Member(terms=(Term(big, torch.ones(2, OUT, dtype=dtype), 16.0, e=torch.full((OUT,), 9e4)),)))
    (term,) = folded.terms
    assert term.a.dtype is term.b.dtype is torch.float32
    assert torch.equal(term.a, big.float() * 16)
    assert torch.equal(term.b, torch.full((2, OUT), 9e4))


def test_fold_without_a_slot_keeps_the_tensors():
    term = Term(torch.ones(IN, 2, dtype=torch.float16), torch.ones(2, OUT, dtype=torch.float16))
    assert fold(Member(terms=(term,)))[0].terms[0] is term


def test_table1_is_the_papers():
    rows = {row.method: (row.owned, dict(row.folds), row.live) for row in table1()}
    assert rows.pop("AdaLoRA") == (("A", "B"), {"d": "A", "c": "A"}, ())  # which the paper leaves out
    assert rows == {
        "LoRA": (("A", "B"), {"c": "A"}, ()),
        "DoRA": (("A", "B"), {"e": "B", "c": "A"}, ("s",)),
        "(IA)3": ((), {}, ("s",)),
        "SSF": ((), {}, ("s", "b")),
        "VeRA": ((), {"c": "d"}, ("d", "e")),
        "OFT": (("R",), {}, ("R",)),
    }


def apply_second(second, x, first, base_bias):
    """F2 on the layer F1 written out: s2 on F1(x R2), but not on the base bias if F2 does not scale it; then the rest.

    first: F1 as a function of its input.
    """
    y = first(rotate(x, second.rotation))
    if second.scale is not None:
        y = y * second.scale
        if base_bias is not None and not second.bias.scaled:
            y = y + base_bias * (1 - second.scale)
    if second.bias.shift is not None:
        y = y + second.bias.shift
    return y + evaluate(Member(terms=second.terms), x, torch.zeros(IN, OUT, dtype=DTYPE), None)


@few
@given(members(replaced=False), members(replaced=False), layers())
def test_stack_is_one_after_the_other(first, second, layer):
    x, weight, base_bias = layer
    if second.rotation is not None and any(term.a_owner is Owner.SHARED for term in first.terms):
        assert obstacle(first, second) is Obstacle.ROTATION
        with pytest.raises(ValueError, match="A is shared"):
            stack(first, second)
        return
    expected = apply_second(second, x, lambda z: evaluate(first, z, weight, base_bias), base_bias)
    close(evaluate(stack(first, second), x, weight, base_bias), expected)


@few
@given(members(), members(rotated=False), layers())
def test_a_replaced_bias_stands_for_the_base_bias_of_both(first, second, layer):
    x, weight, base_bias = layer
    if first.bias.replaced is not None and second.bias.replaced is not None:
        with pytest.raises(ValueError, match="only one"):
            stack(first, second)
        assert obstacle(first, second) is Obstacle.BIAS
        return
    given_bias = first.bias.replaced if second.bias.replaced is None else second.bias.replaced
    base_bias = base_bias if given_bias is None else given_bias
    bare = [replace(m, bias=replace(m.bias, replaced=None)) for m in (first, second)]
    expected = apply_second(bare[1], x, lambda z: evaluate(bare[0], z, weight, base_bias), base_bias)
    close(evaluate(stack(first, second), *layer), expected)


@few
@given(members(replaced=False), members(replaced=False), members(replaced=False), layers())
def test_stack_of_three(first, second, third, layer):
    x, weight, base_bias = layer
    pairs = ((first, second), (first, third), (second, third))
    if any(obstacle(*pair) is not None for pair in pairs):
        with pytest.raises(ValueError, match="cannot be stacked"):
            stack(stack(first, second), third)
        return

    def two(z):
        return apply_second(second, z, lambda y: evaluate(first, y, weight, base_bias), base_bias)

    close(evaluate(stack(stack(first, second), third), *layer), apply_second(third, x, two, base_bias))


@few
@given(members(False, False), layers())
def test_a_member_on_the_base_is_the_member(member, layer):
    close(evaluate(stack(Member(), member), *layer), evaluate(member, *layer))
    close(evaluate(stack(member, Member()), *layer), evaluate(member, *layer))


def test_the_order_of_ia3_and_lora_matters():
    random = tensors(0)
    ia3 = Member(scale=random(OUT), bias=Bias(scaled=True))
    lora = Member(terms=(Term(random(IN, 2), random(2, OUT), 0.5),))
    x, weight, bias = random(TOKENS, IN), random(IN, OUT), random(OUT)
    update = 0.5 * x @ lora.terms[0].a @ lora.terms[0].b
    close(evaluate(stack(lora, ia3), x, weight, bias), (x @ weight + bias + update) * ia3.scale)
    close(evaluate(stack(ia3, lora), x, weight, bias), (x @ weight + bias) * ia3.scale + update)
    assert all(both.bias.scaled and both.bias.factor is None for both in (stack(lora, ia3), stack(ia3, lora)))


def test_ssf_scales_the_base_bias():
    random = tensors(0)
    x, weight, bias, scale, shift = random(TOKENS, IN), random(IN, OUT), random(OUT), random(OUT), random(OUT)
    close(evaluate(ssf(scale, shift), x, weight, bias), (x @ weight + bias) * scale + shift)


def test_what_cannot_be_stacked():
    dora = Member(magnitude=torch.ones(OUT))
    for pair in [(dora, Member()), (Member(), dora)]:
        with pytest.raises(ValueError, match="magnitude"):
            stack(*pair)


@pytest.mark.parametrize(("one", "then"), [(1, 1), (1, 4), (6, 4), (4, 6), (3, 3)])
def test_input_transforms_compose(one, then):
    random = tensors(0)
    first, second = (Rotation(random(12 // width, width, width)) for width in (one, then))
    x, both = random(TOKENS, 12), compose(first, second)
    assert both.width == math.lcm(one, then)
    close(rotate(x, both), rotate(rotate(x, first), second))


def test_float16_does_not_overflow_in_a_stack():
    half = Member(scale=torch.full((OUT,), 300.0).half(), bias=Bias(shift=torch.full((OUT,), 60000.0).half()))
    both = stack(half, half)
    assert float(both.scale[0]) == 90000
    assert float(both.bias.shift[0]) == 300 * 60000 + 60000


def test_magnitude_is_resolved_from_the_weight():
    random = tensors(0)
    term = Term(random(IN, 2), random(2, OUT), 0.5)
    x, weight, bias, magnitude = random(TOKENS, IN), random(IN, OUT), random(OUT), random(OUT)
    total = weight + 0.5 * term.a @ term.b
    dora = Member(terms=(term,), magnitude=magnitude)
    expected = x @ (total / total.norm(dim=0) * magnitude) + bias
    close(evaluate(dora, x, weight, bias), expected)
    resolved = dora.resolve_magnitude(column_norms(weight, dora.terms))
    close(evaluate(fold(resolved)[0], x, weight, bias), expected)
    close(evaluate(fold(dora)[0], x, weight, bias), expected)
    assert live_slots(dora) == ("s", "c")
