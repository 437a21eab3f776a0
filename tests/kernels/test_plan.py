import numpy as np
import pytest

from scute.kernels.plan import UNBOUNDED, BatchPlan, Residents, tile_count, tile_height
from scute.kernels.routes import Part, Route


def residents_of(pairs=(-1,) * 4, rotated=(False,) * 4, ranks=(0,) * 4, pair_ranks=(0,) * 4) -> Residents:
    return Residents(np.array(ranks), np.array(pairs), np.array(rotated), np.array(pair_ranks))


def plan_of(slots, *, force_routes: bool = False, **residents) -> BatchPlan:
    plan = BatchPlan(400, 4, pairs=4, max_rank=256, device="cpu")
    plan.update(np.array(slots, dtype=np.int64), residents_of(**residents), force_routes=force_routes)
    return plan


def used(plan: BatchPlan, part: Part) -> list[list[int]]:
    records = plan.part(part).view(-1, 4 if part in (Part.SHRINK_SMALL, Part.SHRINK_LARGE) else 3)
    return [record for record in records.tolist() if record[2]]


def rows_of(plan: BatchPlan, part: Part = Part.ROWS) -> list[int]:
    return plan.part(part).tolist()


def test_sorts_rows_by_slot_and_leaves_base_rows_out():
    plan = plan_of([2, -1, 0, 2, -1, 0])
    assert rows_of(plan)[:4] == [2, 5, 0, 3]
    assert used(plan, Part.TILES_SMALL) == used(plan, Part.TILES_LARGE) == [[0, 0, 2], [2, 2, 2]]
    assert rows_of(plan, Part.SLOT_OF_ROW)[:8] == [2, -1, 0, 2, -1, 0, -1, -1]


def test_groups_shared_rows_by_pair_over_slots():
    plan = plan_of([3, 0, 1, 3, -1, 2], pairs=[1, -1, 0, 1])
    assert rows_of(plan, Part.SHARED_ROWS)[:4] == [5, 0, 1, 3]
    assert used(plan, Part.SHARED_TILES_SMALL) == [[0, 0, 1], [1, 1, 3]]


def test_cuts_long_segments():
    plan = plan_of([1] * 70)
    assert used(plan, Part.TILES_SMALL) == [[1, 0, 16], [1, 16, 16], [1, 32, 16], [1, 48, 16], [1, 64, 6]]
    assert used(plan, Part.TILES_LARGE) == [[1, 0, 32], [1, 32, 32], [1, 64, 6]]


def test_a_rank_of_a_slot_is_cut_into_chunks():
    plan = plan_of([0, 1, 1, 2, 3], ranks=[8, 70, 0, 0], pairs=[-1, -1, -1, 2], pair_ranks=[0, 0, 30, 0])
    assert used(plan, Part.SHRINK_SMALL) == [[0, 0, 1, 0], *([1, 1, 2, rank] for rank in (0, 16, 32, 48, 64))]
    assert used(plan, Part.SHRINK_LARGE) == [[0, 0, 1, 0], [1, 1, 2, 0], [1, 1, 2, 64]]


def test_too_many_rows_for_small_tiles_leave_their_lists_empty():
    most, more = ([slot for slot in (0, 1) for _ in range(rows)] for rows in (128, 129))
    everything = {"ranks": [9] * 4, "pairs": [0] * 4, "pair_ranks": [5] * 4, "rotated": [True] * 4}
    for small in (Part.TILES_SMALL, Part.SHARED_TILES_SMALL, Part.SHRINK_SMALL, Part.ROTATED_SMALL):
        large = Part(small + 1)
        both, one = plan_of(most, **everything), plan_of(more, **everything)
        assert used(both, small)
        assert used(both, large)
        assert used(one, large)
        assert not one.part(small).any()


def test_rotated_tiles_are_those_of_slots_that_rotate():
    plan = plan_of([2, 0, 2, 1], rotated=[False, False, True, False])
    assert used(plan, Part.ROTATED_SMALL) == [[2, 2, 2]]


def test_keeps_its_buffer_and_forgets_the_last_batch():
    plan = plan_of([0, 1, 2, 3] * 50, pairs=[0, 1, 2, 3], ranks=[9] * 4, pair_ranks=[5] * 4, rotated=[True] * 4)
    before = plan.buffer.data_ptr()
    plan.update(np.array([1]), residents_of())
    assert plan.buffer.data_ptr() == before
    assert used(plan, Part.SHRINK_SMALL) == used(plan, Part.ROTATED_LARGE) == []
    assert used(plan, Part.TILES_SMALL) == used(plan, Part.TILES_LARGE) == [[1, 0, 1]]
    assert used(plan, Part.SHARED_TILES_SMALL) == used(plan, Part.SHARED_TILES_LARGE) == []
    assert rows_of(plan, Part.SLOT_OF_ROW) == [1] + [-1] * 399


@pytest.mark.parametrize(
    ("slots", "expected"),
    [([], [0] * 4), ([-1], [0] * 4), ([0], [1, 0, 0, 8]), ([1], [1, 1, 0, 0]), ([2, 0, 3], [3, 0, 1, 70])],
)
def test_live_routes_and_ranks(slots, expected):
    plan = plan_of(slots, pairs=[-1, 0, -1, -1], rotated=[False, False, True, False], ranks=[8, 0, 70, 3])
    assert plan.live.tolist() == expected


def test_live_bounds_the_tiles_of_every_route():
    plan = plan_of([0] * 20 + [1, 3], pairs=[0, -1, -1, 0], rotated=[False, True, False, False])
    assert plan.live[: len(Route)].tolist() == [4, 2, 1]


def test_forced_routes():
    assert plan_of([-1], force_routes=True).live.tolist() == [UNBOUNDED] * 4


@pytest.mark.parametrize(
    ("slots", "message"), [([4], "slot 4 is outside"), ([0, -2], "slot -2 is below"), ([0] * 401, "401 rows")]
)
def test_refuses_what_it_cannot_hold(slots, message):
    with pytest.raises(ValueError, match=message):
        plan_of(slots)


def test_lists_are_aligned():
    """Otherwise every launch is a slow one."""
    plan = BatchPlan(77, 3, pairs=1, max_rank=9, device="cpu")
    assert all(plan.part(part).data_ptr() % 16 == 0 for part in Part)


def test_tile_numbers():
    assert [tile_height(tokens) for tokens in (1, 256, 257)] == [16, 16, 32]
    assert tile_count(3, 16, 64) == 3
    assert tile_count(100, 16, 4) == 11
    assert tile_count(0, 16, 4) == tile_count(100, 16, 0) == 0
