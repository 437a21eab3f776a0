"""What an engine has no room for is refused with the limit's name; what fits beside it is served."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import World, ask, disagreement, start, stop
from vllm.lora.request import LoRARequest

from scute.engine.admissions import Admissions
from scute.engine.options import Options
from scute.errors import Code, Incompatible, Refusal
from scute.testing.adapters import ALL_LINEAR, AMPLIFIED, ATTENTION, write_adapter
from scute.testing.tiny import tiny_prompts

BOUND = 1e-4
IDS = itertools.count(1)


@pytest.fixture(scope="module")
def small_engine(world) -> Iterator[Any]:
    """An engine with little room, which adapts the attention alone."""
    engine = start(
        world,
        dtype="float32",
        max_loras=1,
        max_cpu_loras=1,
        max_lora_rank=8,
        lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        additional_config={"scute": {"rotation_width": 8, "shared_pairs": 1, "shared_rank": 64}},
    )
    yield engine
    stop(engine)


@pytest.fixture
def small(small_engine) -> Iterator[Any]:
    """The small engine, with all of its room for every test."""
    yield small_engine
    for number, _ in list(Admissions.of(small_engine.llm_engine).admitted):
        small_engine.llm_engine.remove_lora(number)


@pytest.fixture(scope="module")
def bare(world) -> Iterator[Any]:
    """An engine without any room for R and for shared pairs, with 2 MiB of host memory and 0.4 MiB on the device."""
    options = {"rotation_width": 0, "shared_pairs": 0, "host_memory_gib": 2 / 1024, "adapter_memory_gib": 0.4 / 1024}
    engine = start(world, dtype="float32", max_loras=2, max_cpu_loras=2, additional_config={"scute": options})
    yield engine
    stop(engine)


@pytest.fixture
def write(world, tmp_path):
    """Writer of an adapter of a recipe on the attention, or on other targets, with other options."""

    def write(recipe: str, targets: tuple[str, ...] = ATTENTION, **options: Any) -> Path:
        folder = tmp_path / f"{recipe}-{len(list(tmp_path.iterdir()))}"
        return write_adapter(world.oracle.base, replace(AMPLIFIED[recipe], targets=targets), folder, **options)

    return write


SERVED: list[tuple[Any, LoRARequest]] = []


@pytest.fixture(autouse=True)
def removed() -> Iterator[None]:
    """Take out what a test has served: an admitted adapter keeps its places."""
    yield
    while SERVED:
        llm, request = SERVED.pop()
        llm.llm_engine.remove_lora(request.lora_int_id)


def serves(world: World, llm: Any, folder: Path) -> LoRARequest:
    """Serve the adapter beside a base row, and hold both against the PEFT library."""
    request = LoRARequest(str(folder), next(IDS), str(folder))
    still_serves(world, llm, request)
    SERVED.append((llm, request))
    return request


def still_serves(world: World, llm: Any, request: LoRARequest) -> None:
    prompt = tiny_prompts(1)[0]
    mine, base = ask(llm, [(request, prompt), (None, prompt)])
    named = World(world.base, world.oracle, {"mine": request.lora_path})
    assert disagreement(named, "mine", [mine]) <= BOUND
    assert disagreement(world, None, [base]) <= BOUND


def refuses(llm: Any, folder: Path, code: Code, *words: str) -> None:
    with pytest.raises(Refusal) as refusal:
        ask(llm, [(LoRARequest(str(folder), next(IDS), str(folder)), tiny_prompts(1)[0])])
    assert refusal.value.code is code, str(refusal.value)
    for word in words:
        assert word in refusal.value.sentence


@pytest.mark.engine
@pytest.mark.parametrize("recipe", ["lora-r8", "dora", "oft", "vera", "ia3-attention"])
def test_up_to_the_limit(world, small, write, recipe: str):
    options = {"lora-r8": {"r": 8}, "dora": {"r": 8}, "oft": {"oft_block_size": 8}, "vera": {"r": 64}}
    serves(world, small, write(recipe, **options.get(recipe, {})))


@pytest.mark.engine
def test_rank(small, write):
    for recipe in ["lora-r8", "dora"]:
        refuses(small, write(recipe, r=9), Code.CAPACITY_RANK, "rank 9", "max_lora_rank 8", "--max-lora-rank")


@pytest.mark.engine
def test_rank_of_a_single_projection(small, write):
    refuses(small, write("lora-r8", r=4, rank_pattern={"layers.1.self_attn.k_proj": 12}), Code.CAPACITY_RANK, "rank 12")


@pytest.mark.engine
def test_width_of_a_block(small, write):
    refuses(
        small, write("oft", oft_block_size=16), Code.CAPACITY_ROTATION, "16", "rotation_width 8", "additional_config"
    )


@pytest.mark.engine
def test_rank_of_a_shared_pair(small, write):
    refuses(small, write("vera", r=65), Code.CAPACITY_SHARED, "rank 65", "shared_rank 64", "additional_config")


@pytest.mark.engine
@pytest.mark.parametrize("targets", [("gate_proj",), ("q_proj", "down_proj")])
def test_a_projection_that_the_engine_does_not_adapt(small, write, targets: tuple[str, ...]):
    refuses(small, write("lora-r8", targets), Code.MODULE_UNSUPPORTED, targets[-1], "--lora-target-modules")


@pytest.mark.engine
def test_a_second_shared_pair(world, small, write):
    """A place belongs to the adapters with its pair until the last of them is removed."""
    first, same, other = write("vera", r=32), write("vera", r=32), write("vera", r=32, projection_prng_key=99)
    held = [serves(world, small, first), serves(world, small, same)]
    refuses(small, other, Code.CAPACITY_SHARED, "shared_pairs", "1")
    for request in held:
        still_serves(world, small, request)
        small.llm_engine.remove_lora(request.lora_int_id)
    serves(world, small, other)


@pytest.mark.engine
def test_a_place_is_not_taken_from_an_adapter_that_vllm_evicted(world, small, write):
    """Its next request would find no place in the middle of a step, which ends the engine."""
    held = serves(world, small, write("vera", r=32))
    serves(world, small, write("lora-r8"))
    refuses(small, write("vera", r=32, projection_prng_key=99), Code.CAPACITY_SHARED)
    still_serves(world, small, held)


@pytest.mark.engine
def test_an_adapter_that_is_replaced_in_place_gives_its_shared_pair_back(world, small, write):
    held = serves(world, small, write("vera", r=32))
    lora = LoRARequest("lora", held.lora_int_id, str(write("lora-r8")), load_inplace=True)
    still_serves(world, small, lora)
    serves(world, small, write("vera", r=32, projection_prng_key=99))


@pytest.mark.engine
def test_without_room_for_rotations_and_pairs(world, bare, write):
    refuses(bare, write("oft"), Code.CAPACITY_ROTATION, "rotation_width", "additional_config")
    refuses(bare, write("ia3", ("k_proj", "o_proj"), feedforward_modules=["o_proj"]), Code.CAPACITY_ROTATION)
    refuses(bare, write("vera", r=32), Code.CAPACITY_SHARED, "shared_pairs is 0")
    for name in ["lora-r8", "dora", "ia3", "rslora-r16"]:
        request = serves(world, bare, Path(world.folders[name]))
        bare.llm_engine.remove_lora(request.lora_int_id)


@pytest.mark.engine
def test_an_output_head(bare, write):
    refuses(bare, write("lora-r8", ("q_proj", "lm_head")), Code.MODULE_UNSUPPORTED, "lm_head")


@pytest.mark.engine
def test_adapters_that_do_not_fit_the_device_together(world, bare, write):
    """Rank 16 on every projection takes 235 KiB, and two adapters may be in one batch."""
    large, other = (write("rslora-r16", ALL_LINEAR, rank_pattern={"gate_proj": rank}) for rank in (16, 15))
    held = serves(world, bare, large)
    refuses(bare, other, Code.CAPACITY_DEVICE, "--max-loras = 2", "MiB", "adapter_memory_gib", "additional_config")
    serves(world, bare, write("lora-r8"))
    still_serves(world, bare, held)
    bare.llm_engine.remove_lora(held.lora_int_id)
    serves(world, bare, other)


@pytest.mark.engine
def test_an_adapter_that_is_replaced_in_place_gives_its_device_memory_back(world, bare, write):
    held = serves(world, bare, write("rslora-r16", ALL_LINEAR))
    for recipe in ["dora", "rslora-r16"]:
        still_serves(world, bare, LoRARequest(recipe, held.lora_int_id, str(write(recipe)), load_inplace=True))


@pytest.mark.engine
def test_scattered_device_memory_is_moved_together(world, bare, write):
    """The third takes the slot of the first, and the room of the first and of what follows the second."""
    first, second = (serves(world, bare, write("lora-r8", ALL_LINEAR, lora_alpha=alpha)) for alpha in (8, 16))
    third = serves(world, bare, write("rslora-r16", ALL_LINEAR))
    for request in [second, third, first, second]:
        still_serves(world, bare, request)


@pytest.mark.engine
def test_an_adapter_beyond_the_host_budget(world, bare, write):
    """The others go on: none was dropped to make room."""
    folders = [write("rslora-r16", ("gate_proj", "up_proj", "down_proj"), r=16) for _ in range(20)]
    size = (folders[0] / "adapter_model.safetensors").stat().st_size
    room = 2**21 // size
    held = [serves(world, bare, folder) for folder in folders[:room]]
    refuses(bare, folders[room], Code.CAPACITY_HOST, "host_memory_gib")
    for request in held:
        still_serves(world, bare, request)


@pytest.mark.engine
def test_an_unknown_option_ends_the_start_with_a_line(world):
    with pytest.raises(Incompatible) as error:
        start(world, dtype="float32", additional_config={"scute": {"rotation_widht": 8}})
    assert "additional_config['scute'].rotation_widht" in str(error.value)
    assert "rotation_width" in str(error.value)
    assert "\n" not in str(error.value)


def configured(options: Any) -> Any:
    return SimpleNamespace(additional_config=options)


def test_options_that_are_left_out_have_defaults():
    for given in [{}, {"scute": {}}, {"another": {"x": 1}}, None, "opaque"]:
        assert Options.read(configured(given)) == Options()
    assert Options.read(configured({"scute": {"shared_pairs": 2}})).shared_pairs == 2


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"shared_pair": 1}, ".shared_pair"),
        ({"rotation_width": 129}, ".rotation_width"),
        ({"rotation_width": "wide"}, ".rotation_width"),
        ({"shared_rank": 0}, ".shared_rank"),
        ({"host_memory_gib": -1}, ".host_memory_gib"),
        ({"adapter_memory_gib": 0}, ".adapter_memory_gib"),
        ("rotation_width=8", "additional_config['scute'] is"),
        (None, "additional_config['scute'] is"),
    ],
)
def test_an_invalid_option_is_named(given: Any, where: str):
    with pytest.raises(Incompatible) as error:
        Options.read(configured({"scute": given}))
    assert where in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.engine
def test_refusals_leave_two_ranks_in_step(world, write, monkeypatch):
    """More than the queue between a worker and the engine holds: an answer that nobody reads would fill it."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    two = start(world, dtype="float32", tensor_parallel_size=2, max_loras=2, max_cpu_loras=2, max_lora_rank=8)
    try:
        large = write("rslora-r16")
        for _ in range(15):
            refuses(two, large, Code.CAPACITY_RANK, "LoRA rank 16")
        request = LoRARequest("served", next(IDS), str(write("lora-r8")))
        still_serves(world, two, request)
        assert two.llm_engine.remove_lora(request.lora_int_id)
    finally:
        stop(two)
