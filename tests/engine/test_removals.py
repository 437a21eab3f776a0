"""Removal and replacement of an adapter at the engine core: behind the requests that use it, and never forgotten."""

import pytest

pytest.importorskip("vllm")

from fake_core import Core, adapter

from scute.engine.removals import LAST_ID


@pytest.fixture
def core() -> Core:
    core = Core()
    core.add(adapter(1))
    core.use("base", None)
    return core


def test_an_unused_adapter_goes_at_once(core: Core):
    assert core.remove(1)
    assert core.calls[-1] == ("remove", 1)
    assert core.held == {}


def test_one_in_use_goes_with_the_next_call_after_its_last_request(core: Core):
    core.use("first", 1)
    core.use("second", 1)
    assert core.remove(1)
    core.end("first")
    assert core.list() == set(), "it is removed for whoever asks"
    assert core.held == {1: "/a"}
    core.end("second")
    core.add(adapter(2))
    assert core.calls[-2:] == [("remove", 1), ("add", (2, False))], "it makes room first"


def test_one_in_use_goes_with_the_step_that_ends_its_last_request(core: Core):
    core.use("first", 1)
    core.remove(1)
    core.post_step(True)
    assert core.held == {1: "/a"}
    core.end("first")
    core.post_step(False)
    assert core.calls[-2:] == [("step", False), ("remove", 1)]
    core.post_step(False)
    assert core.calls[-1] == ("step", False), "it goes once"


@pytest.mark.parametrize("is_removed", [False, True], ids=["in-place", "removed-and-loaded"])
def test_what_takes_the_place_of_one_in_use_is_beside_it(core: Core, is_removed: bool):
    old = core.use("old", 1)
    if is_removed:
        core.remove(1)
    core.add(adapter(1, "/b", load_inplace=not is_removed))
    new = core.use("new", 1, path="/b")
    assert (core.serves(old), core.serves(new)) == ("/a", "/b")
    assert core.list() == {1}
    core.post_step(True)
    assert len(core.held) == 2
    core.end("old")
    core.post_step(True)
    assert list(core.held.values()) == ["/b"]
    assert core.serves(new) == "/b"
    assert core.list() == {1}
    assert core.pin(1)
    assert core.remove(1)
    core.end("new")
    core.post_step(True)
    assert core.held == {}
    core.add(adapter(1))
    assert core.held == {1: "/a"}


def test_one_is_replaced_again_and_again_while_all_its_requests_run(core: Core):
    running = [core.use("r0", 1)]
    for number in range(1, 6):
        core.add(adapter(1, f"/{number}", load_inplace=True))
        running.append(core.use(f"r{number}", 1, path=f"/{number}"))
    assert [core.serves(request) for request in running] == ["/a", "/1", "/2", "/3", "/4", "/5"]
    for number in range(6):
        core.end(f"r{number}")
    core.post_step(True)
    assert list(core.held.values()) == ["/5"], "the last one stays"
    assert core.list() == {1}


def test_one_that_nobody_uses_is_replaced_where_it_is(core: Core):
    core.add(adapter(1, "/b", load_inplace=True))
    assert core.held == {1: "/b"}


def test_a_replacement_that_fails_changes_nothing(core: Core):
    old = core.use("old", 1)
    with pytest.raises(OSError, match="/bad"):
        core.add(adapter(1, "/bad", load_inplace=True))
    assert core.serves(core.use("later", 1)) == core.serves(old) == "/a"
    core.end("old")
    core.end("later")
    core.post_step(True)
    assert core.held == {1: "/a"}


@pytest.mark.parametrize("way", ["first", "in-place", "removed-and-loaded"])
def test_a_load_that_fails_after_the_admission_leaves_nothing_behind(core: Core, way: str):
    number = 2 if way == "first" else 1
    core.use("old", 1)
    if way == "removed-and-loaded":
        core.remove(1)
    core.fails = True
    with pytest.raises(RuntimeError, match="no slot"):
        core.add(adapter(number, "/b", load_inplace=way == "in-place"))
    assert core.held == {1: "/a"}
    core.fails = False
    core.add(adapter(number, "/c", load_inplace=way == "in-place"))
    assert core.serves(core.use("new", number, path="/c")) == "/c"


def test_what_is_loaded_beside_another_is_read_from_its_folder(core: Core):
    """A worker may keep another adapter under an id that it had before."""
    core.use("old", 1)
    core.held[LAST_ID] = "/stale"
    core.add(adapter(1, "/b", load_inplace=True))
    assert core.serves(core.use("new", 1, path="/b")) == "/b"


@pytest.mark.parametrize("is_used", [False, True])
def test_a_request_on_its_way_has_what_is_loaded_when_it_is_queued(core: Core, is_used: bool):
    """Its path is that of the adapter which it was accepted for: a worker that reads it would admit it in a step."""
    if is_used:
        core.use("old", 1)
    late = core.arrive("late", 1)
    core.add(adapter(1, "/b", load_inplace=True))
    core.queue(late)
    assert core.serves(late) == late.lora_request.lora_path == "/b"
    assert not late.lora_request.load_inplace


def test_what_is_loaded_stays(core: Core):
    assert core.add(adapter(1))
    assert core.held == {1: "/a"}
    with pytest.raises(ValueError, match="lora_int_id 1 is the id of another adapter"):
        core.add(adapter(1, "/b"))


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_pin_is_that_of_the_version_that_new_requests_get(core: Core, is_removed: bool):
    core.pin(1)
    core.use("old", 1)
    if is_removed:
        core.remove(1)
    core.add(adapter(1, "/b", load_inplace=not is_removed))
    new = core.use("new", 1, path="/b")
    assert (new.lora_request.lora_int_id in core.pinned) is not is_removed


def test_an_id_of_the_engine_s_own_is_nobody_else_s(core: Core):
    core.add(adapter(LAST_ID))
    core.use("old", 1)
    core.add(adapter(1, "/b", load_inplace=True))
    assert core.held == {1: "/a", LAST_ID: "/a", LAST_ID - 1: "/b"}
    with pytest.raises(ValueError, match="id of another adapter"):
        core.add(adapter(LAST_ID - 1))
