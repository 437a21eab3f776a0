import numpy as np
import pytest

from scute.kernels.plan import LARGE_TILE, SMALL_TILE, BatchPlan, tile_count

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


@st.composite
def batches(draw):
    slots = draw(st.integers(1, 9))
    tokens = draw(st.lists(st.integers(-1, slots - 1), max_size=200))
    # Long segments, which single draws seldom make.
    tokens += [draw(st.integers(-1, slots - 1))] * draw(st.integers(0, 150))
    pairs = draw(st.lists(st.integers(-1, 3), min_size=slots, max_size=slots))
    return slots, np.array(tokens, dtype=np.int64), np.array(pairs)


def check(keys: np.ndarray, rows: np.ndarray, tiles: np.ndarray, height: int, segments: int) -> None:
    used = tiles[tiles[:, 2] > 0]
    assert (tiles[len(used) :, 2] == 0).all(), "used tiles come first, so that a launch may stop at the bound"
    assert len(used) <= tile_count(len(keys), height, segments)
    assert (used[:, 2] <= height).all()
    assert (np.diff(used[:, 0]) >= 0).all()
    covered = [row for _, first, count in used for row in rows[first : first + count]]
    assert covered == np.argsort(keys, kind="stable")[np.count_nonzero(keys < 0) :].tolist()
    for key, first, count in used:
        assert (keys[rows[first : first + count]] == key).all()


@hypothesis.given(batches(), st.integers(0, 40))
@hypothesis.settings(deadline=None, max_examples=150)
def test_tiles_cover_every_adapter_row_once(batch, spare):
    slots, slot_of_token, pair_of_slot = batch
    plan = BatchPlan(len(slot_of_token) + spare, slots, "cpu")
    plan.update(slot_of_token, pair_of_slot, np.zeros(slots, dtype=bool))
    pair_of_token = np.append(pair_of_slot, -1)[slot_of_token]
    rows, shared_rows = plan.rows.numpy(), plan.shared_rows.numpy()
    check(slot_of_token, rows, plan.tiles_small.numpy(), SMALL_TILE, slots)
    check(slot_of_token, rows, plan.tiles_large.numpy(), LARGE_TILE, slots)
    check(pair_of_token, shared_rows, plan.shared_tiles_small.numpy(), SMALL_TILE, min(slots, 4))
    check(pair_of_token, shared_rows, plan.shared_tiles_large.numpy(), LARGE_TILE, min(slots, 4))
    assert plan.live.tolist() == [(slot_of_token >= 0).any(), (pair_of_token >= 0).any(), 0]
