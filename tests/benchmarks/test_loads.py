"""Streams are drawn in advance, alike for every arm, with the lengths and arrivals of the paper's section 6.1."""

import numpy as np
import pytest
from serving.loads import LENGTHS, Load, draw, touch


def test_the_same_stream_for_every_arm_and_another_for_every_repetition():
    load = Load.parse("decode:8")
    first, again, next_one = (draw(load, 40, 20, 1000, repetition) for repetition in (0, 0, 1))
    assert first == again
    assert [r.tokens for r in first] != [r.tokens for r in next_one]
    assert [r.arrival for r in first] != [r.arrival for r in next_one]


@pytest.mark.parametrize("kind", LENGTHS)
def test_lengths(kind):
    prompt_tokens, output_tokens = LENGTHS[kind]
    for request in draw(Load(kind), 10, 4, 1000, 0):
        assert (len(request.tokens), request.output_tokens) == (prompt_tokens, output_tokens)
        assert min(request.tokens) >= 3


def test_a_burst_arrives_at_once_and_tenants_take_turns():
    requests = draw(Load.parse("prefill:burst"), 160, 20, 1000, 0)
    assert {request.arrival for request in requests} == {0.0}
    assert np.bincount([request.tenant for request in requests]).tolist() == [8] * 20


def test_a_rate_is_a_poisson_process():
    gaps = np.diff([request.arrival for request in draw(Load.parse("decode:4"), 4000, 20, 1000, 0)])
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.1)


def test_zipf_gives_the_first_tenant_twice_the_second():
    counts = np.bincount([r.tenant for r in draw(Load.parse("decode:burst:zipf"), 20000, 20, 1000, 0)])
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.1)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.2)


def test_touch_reaches_every_tenant():
    assert [request.tenant for request in touch(Load.parse("decode:16:zipf"), 20, 1000)] == list(range(20))


@pytest.mark.parametrize("text", ["decode", "encode:burst", "decode:burst:uniform", "decode:fast"])
def test_what_is_no_load_is_refused(text):
    with pytest.raises(ValueError, match=r"load|float|unpack"):
        Load.parse(text)


@pytest.mark.parametrize("text", ["decode:burst", "prefill:16", "decode:burst:zipf"])
def test_a_name_says_what_was_parsed(text):
    assert Load.parse(text).name == text
