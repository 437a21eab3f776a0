import importlib
import subprocess
import sys

import pytest
import torch
from kernel_cases import PROJECTIONS, ROTATIONS, Truth, assert_same_bits, assert_true, build

from scute.kernels import ops, reference
from scute.kernels.plan import UNBOUNDED

NAMES = ["adapt", "rotate", "linear"]
MUTATING = ["adapt"]


def arguments(name: str):
    case = build(PROJECTIONS[4] if name in MUTATING else ROTATIONS[0], torch.float32, "cpu")
    args = getattr(case, f"{name}_args")
    return case, args(case.y.clone()) if name in MUTATING else args()


@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_runs_the_reference(name):
    case, args = arguments(name)
    twin, twin_args = arguments(name)
    assert case.plan is not twin.plan
    result = getattr(torch.ops.scute, name)(*args)
    expected = getattr(reference, name)(*twin_args)
    assert_same_bits(*((args[0], twin_args[0]) if name in MUTATING else (result, expected)))


@pytest.mark.parametrize("name", NAMES)
def test_registration(name, monkeypatch):
    case, args = arguments(name)
    monkeypatch.setattr("scute.kernels.arguments.plan_of", lambda _: case.plan)  # opcheck copies every argument
    case.plan.buffer.clamp_(max=2**15)  # opcheck compares every argument, so none may hold poison
    args = tuple(arg.nan_to_num() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args)
    torch.library.opcheck(getattr(torch.ops.scute, name).default, args)


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_graph_follows_live(name):
    op = getattr(torch.ops.scute, name)
    case, args = arguments(name)

    @torch.compile(fullgraph=True, backend="eager")
    def layer(*args):
        result = op(*args)
        return args[0] + 0 if result is None else result + 0

    case.plan.live.zero_()
    idle = layer(*args)
    case.plan.live.fill_(UNBOUNDED)
    busy = layer(*args)
    assert not torch.equal(idle, busy)
    if name == "adapt":
        assert_same_bits(idle, case.y)
        assert_true(busy, case.truth, Truth.adapt)
    if name == "rotate":
        assert_same_bits(idle, case.x.repeat(3, 1, 1))
        assert_true(busy, case.truth, Truth.rotate)


def test_fakes_give_shape_and_dtype():
    _, args = arguments("linear")
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        y = torch.ops.scute.linear(*fakes)
        inputs = torch.ops.scute.rotate(fakes[0].half(), *fakes[3:])
    assert (tuple(y.shape), y.dtype) == ((30, 16), torch.float32)
    assert (tuple(inputs.shape), inputs.dtype) == ((3, 30, 48), torch.float16)


def test_survives_a_second_import():
    importlib.reload(ops)
    del sys.modules["scute.kernels.ops"]
    importlib.import_module("scute.kernels.ops")
    _, args = arguments("rotate")
    assert torch.ops.scute.rotate(*args).shape == (3, 30, 48)


def test_the_cpu_path_needs_no_triton():
    program = "import sys; sys.modules['triton'] = None; import scute.kernels.ops; import torch; torch.ops.scute.rotate"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
