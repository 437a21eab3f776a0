import numpy as np
import pytest

from scute.kernels.plan import LARGE_TILE, RANK_CHUNKS, SMALL_TILE, BatchPlan, Residents, tile_count
from scute.kernels.routes import Part

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
    plan = BatchPlan(len(slot_of_token) + spare, slots, 4, max_rank=200, shared_rank=70, device="cpu")
    residents = Residents.none(slots, 4)
    residents.pair[:], residents.rank[:], residents.pair_rank[:] = pair_of_slot, 200 // (1 + np.arange(slots)), 70
    plan.update(slot_of_token, residents)
    pair_of_token = np.append(pair_of_slot, -1)[slot_of_token]
    rows, shared_rows = (plan.part(part).numpy() for part in (Part.ROWS, Part.SHARED_ROWS))
    for size, height in enumerate((SMALL_TILE, LARGE_TILE)):
        tiles = plan.part(Part(Part.TILES_SMALL + size)).view(-1, 3).numpy()
        shared_tiles = plan.part(Part(Part.SHARED_TILES_SMALL + size)).view(-1, 3).numpy()
        check(slot_of_token, rows, tiles, height, slots)
        check(pair_of_token, shared_rows, shared_tiles, height, min(slots, 4))
        chunk = RANK_CHUNKS[size]
        expected = [(*tile, r) for tile in tiles if tile[2] for r in range(0, residents.rank[tile[0]], chunk)]
        expected += [(-1 - pair, *tile, r) for pair, *tile in shared_tiles if tile[1] for r in range(0, 70, chunk)]
        items = plan.part(Part(Part.SHRINK_SMALL + size)).view(-1, 4).numpy()
        assert [tuple(item) for item in items[: len(expected)]] == expected
        assert not items[len(expected) :].any()
    assert plan.live.tolist() == [(slot_of_token >= 0).any(), (pair_of_token >= 0).any(), 0]
