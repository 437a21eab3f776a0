import numpy as np
import pytest
import torch

from scute.kernels.plan import BatchPlan, tile_count, tile_height

NO_PAIR = np.full(4, -1)
NO_ROTATION = np.zeros(4, dtype=bool)


def plan_of(slots, pairs=NO_PAIR, rotated=NO_ROTATION, **options) -> BatchPlan:
    plan = BatchPlan(400, 4, "cpu")
    plan.update(np.array(slots, dtype=np.int64), np.asarray(pairs), np.asarray(rotated, dtype=bool), **options)
    return plan


def used(tiles: torch.Tensor) -> list[list[int]]:
    return [tile for tile in tiles.tolist() if tile[2]]


def test_sorts_rows_by_slot_and_leaves_base_rows_out():
    plan = plan_of([2, -1, 0, 2, -1, 0])
    assert plan.rows[:4].tolist() == [2, 5, 0, 3]
    assert used(plan.tiles_small) == used(plan.tiles_large) == [[0, 0, 2], [2, 2, 2]]
    assert plan.slot_of_row[:8].tolist() == [2, -1, 0, 2, -1, 0, -1, -1]


def test_groups_shared_rows_by_pair_over_slots():
    plan = plan_of([3, 0, 1, 3, -1, 2], pairs=[1, -1, 0, 1])
    assert plan.shared_rows[:4].tolist() == [5, 0, 1, 3]
    assert used(plan.shared_tiles_small) == [[0, 0, 1], [1, 1, 3]]


def test_cuts_long_segments():
    plan = plan_of([1] * 70)
    assert used(plan.tiles_small) == [[1, 0, 16], [1, 16, 16], [1, 32, 16], [1, 48, 16], [1, 64, 6]]
    assert used(plan.tiles_large) == [[1, 0, 64], [1, 64, 6]]


def test_views_keep_their_addresses_and_forget_the_last_batch():
    plan = plan_of([0, 1, 2, 3] * 50, pairs=[0, 1, 2, 3])
    before = [view.data_ptr() for view in (plan.rows, plan.tiles_small, plan.slot_of_row)]
    plan.update(np.array([1]), NO_PAIR, NO_ROTATION)
    assert [view.data_ptr() for view in (plan.rows, plan.tiles_small, plan.slot_of_row)] == before
    assert used(plan.tiles_small) == used(plan.tiles_large) == [[1, 0, 1]]
    assert used(plan.shared_tiles_small) == used(plan.shared_tiles_large) == []
    assert plan.slot_of_row.tolist() == [1] + [-1] * 399


@pytest.mark.parametrize(
    ("slots", "expected"), [([], [0, 0, 0]), ([-1], [0, 0, 0]), ([0], [1, 0, 0]), ([1], [1, 1, 0]), ([2], [1, 0, 1])]
)
def test_live_routes(slots, expected):
    plan = plan_of(slots, pairs=[-1, 0, -1, -1], rotated=[False, False, True, False])
    assert plan.live.tolist() == expected


def test_forced_routes():
    assert plan_of([-1], force_routes=True).live.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("slots", "message"), [([4], "slot 4 is outside"), ([0, -2], "slot -2 is below"), ([0] * 401, "401 rows")]
)
def test_refuses_what_it_cannot_hold(slots, message):
    with pytest.raises(ValueError, match=message):
        plan_of(slots)


def test_tile_numbers():
    assert [tile_height(tokens) for tokens in (1, 256, 257)] == [16, 16, 64]
    assert tile_count(3, 16, 64) == 3
    assert tile_count(100, 16, 4) == 11
    assert tile_count(0, 16, 4) == 0
