from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from scute.kernels.plan import (
    HEIGHTS,
    PAIR_HEIGHTS,
    RANK_CHUNKS,
    BatchPlan,
    Residents,
    shrink_items,
    tile_count,
    tile_height,
)
from scute.kernels.routes import Part, Route

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

PAIRS, MAX_RANK, SHARED_RANK, MOST_ROWS = 3, 130, 70, 700
Records = list[tuple[int, ...]]


@st.composite
def batches(draw, slots: int) -> np.ndarray:
    """Single rows, and runs as long as a prefill's, of slots or the base model."""
    slot = st.integers(-1, slots - 1)
    rows = draw(st.lists(slot, max_size=120))
    for _ in range(draw(st.integers(0, 3))):
        rows += [draw(slot)] * draw(st.sampled_from((1, 15, 16, 17, 32, 33, 100, 180)))
    return np.array(rows, dtype=np.int32)


@st.composite
def residents_of(draw, slots: int) -> Residents:
    def integers(low: int, high: int, size: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(low, high), min_size=size, max_size=size)), dtype=np.int32)

    ranks, pairs, rotated = integers(0, MAX_RANK, slots), integers(-1, PAIRS - 1, slots), integers(0, 1, slots)
    if draw(st.booleans()):
        pairs[:] = -1
    return Residents(ranks, pairs, rotated > 0, integers(1, SHARED_RANK, PAIRS))


@st.composite
def steps(draw) -> tuple[int, list[tuple[np.ndarray, Residents]]]:
    slots = draw(st.integers(1, 30))
    return slots, draw(st.lists(st.tuples(batches(slots), residents_of(slots)), min_size=1, max_size=3))


def plain_lists(slot_of_row: np.ndarray, residents: Residents) -> dict[Part, Records]:
    """The records of every list, one by one."""
    pair_of_row = [-1 if slot < 0 else residents.pair[slot] for slot in slot_of_row]
    lists: dict[Part, Records] = {}
    for size, (height, chunk) in enumerate(zip(HEIGHTS, RANK_CHUNKS, strict=True)):
        is_used = height >= tile_height(len(slot_of_row))
        tiles = list(plain_tiles(slot_of_row, height)) if is_used else []
        shared_tiles = list(plain_tiles(pair_of_row, PAIR_HEIGHTS[size])) if is_used else []
        items = [(*tile, first) for tile in tiles for first in range(0, residents.rank[tile[0]], chunk)]
        lists[Part(Part.TILES_SMALL + size)] = tiles
        lists[Part(Part.SHARED_TILES_SMALL + size)] = shared_tiles
        lists[Part(Part.SHRINK_SMALL + size)] = items
        lists[Part(Part.ROTATED_SMALL + size)] = [tile for tile in tiles if residents.rotated[tile[0]]]
    return lists


def plain_tiles(keys: Iterable[int], height: int) -> Iterator[tuple[int, int, int]]:
    first, in_order = 0, plain_order(keys)
    for key in sorted({key for key, _ in in_order}):
        left = sum(other == key for other, _ in in_order)
        while left:
            count = min(left, height)
            yield key, first, count
            first, left = first + count, left - count


def plain_order(keys: Iterable[int]) -> list[tuple[int, int]]:
    """(key, row) of the rows with a key."""
    return sorted((int(key), row) for row, key in enumerate(keys) if key >= 0)


@hypothesis.given(steps())
@hypothesis.settings(deadline=None, max_examples=150)
def test_every_step_is_what_a_plain_construction_gives(steps):
    """Whatever the steps before it were."""
    slots, batches = steps
    plan = BatchPlan(MOST_ROWS, slots, PAIRS, MAX_RANK, device="cpu")
    for slot_of_row, residents in batches:
        plan.update(slot_of_row, residents)
        pair_of_row = np.append(residents.pair, -1)[slot_of_row]
        for part, keys in ((Part.ROWS, slot_of_row), (Part.SHARED_ROWS, pair_of_row)):
            expected = [row for _, row in plain_order(keys)]
            assert plan.part(part)[: len(expected)].tolist() == expected
        padding = [-1] * (MOST_ROWS - len(slot_of_row))
        assert plan.part(Part.SLOT_OF_ROW).tolist() == [*slot_of_row, *padding]
        for part, records in plain_lists(slot_of_row, residents).items():
            expected = [number for record in records for number in record]
            actual = plan.part(part)
            assert actual[: len(expected)].tolist() == expected
            assert not actual[len(expected) :].any()
        slots_there = slot_of_row[slot_of_row >= 0]
        assert (plan.live[Route.LOW_RANK] > 0) == (len(slots_there) > 0)
        assert (plan.live[Route.SHARED] > 0) == (pair_of_row >= 0).any()
        assert (plan.live[Route.ROTATION] > 0) == residents.rotated[slots_there].any()


@hypothesis.given(st.integers(1, 30).flatmap(lambda slots: st.tuples(st.just(slots), batches(slots))))
@hypothesis.settings(deadline=None, max_examples=100)
def test_a_launch_of_the_bound_reaches_every_tile(slots_and_batch):
    """Also where a graph pads the batch by any number of rows."""
    slots, slot_of_row = slots_and_batch
    for tokens in {len(slot_of_row), 256, 257, MOST_ROWS}:
        if tokens >= len(slot_of_row):
            height = tile_height(tokens)
            assert len(list(plain_tiles(slot_of_row, height))) <= tile_count(tokens, height, slots)


@pytest.mark.parametrize("most_rows", [1, 40, 256, 257, 700])
def test_lists_hold_what_a_launch_reads(most_rows: int):
    """A launch reads as far as the bounds of its rows, padding included."""
    plan = BatchPlan(most_rows, 20, PAIRS, MAX_RANK, device="cpu")
    for rows in {min(rows, most_rows) for rows in (1, 255, 256, 257, most_rows)}:
        height = tile_height(rows)
        size = HEIGHTS.index(height)
        tiles, shared_tiles = tile_count(rows, height, 20), tile_count(rows, PAIR_HEIGHTS[size], PAIRS)
        items = shrink_items(tiles, MAX_RANK, size)
        assert len(plan.part(Part(Part.TILES_SMALL + size))) >= 3 * tiles
        assert len(plan.part(Part(Part.ROTATED_SMALL + size))) >= 3 * tiles
        assert len(plan.part(Part(Part.SHARED_TILES_SMALL + size))) >= 3 * shared_tiles
        assert len(plan.part(Part(Part.SHRINK_SMALL + size))) >= 4 * items
