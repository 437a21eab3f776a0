"""The kernels as compiled for a real GPU, at sizes of a real model."""

from itertools import pairwise

import pytest
import torch
from kernel_cases import NAN, Adapter, Spec, Truth, assert_same_bits, assert_true, batch, build, mixed_pool

from scute.kernels import (
    ops,  # noqa: F401 - registers torch.ops.scute
    sizes,
)
from scute.kernels.plan import UNBOUNDED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

QKV = (4096, 1024, 1024)
POOL = (*mixed_pool(3, (8, 64, 16)), Adapter(ranks=(32, 8, 64), scale=True))
SPECS = [
    Spec("decode", 4096, QKV, POOL, batch(40, 9), padding=8, pair_ranks=(64, 256), in_offset=16),
    Spec("prefill", 4096, QKV, POOL, batch(300, 9) + (1,) * 100, padding=16, pair_ranks=(64, 256)),
    Spec("odd", 1000, (260, 36), (*mixed_pool(2, (9, 40, 24)),), batch(50, 8), pair_ranks=(33, 70), in_offset=5),
]
LONG = (Adapter(ranks=(300, 1, 48)), Adapter(ranks=(16, 16, 16)), Adapter(ranks=(0, 65, 17), scale=True))
SPECS += [
    Spec("long decode", 4096, QKV, LONG, batch(40, 3), padding=8),
    Spec("long prefill", 4096, QKV, LONG, batch(400, 3), padding=16),
]
TURNS = [
    Spec("decode", 4096, QKV, (Adapter(widths=(32, 32, 32)), Adapter(widths=(1, 256, 0))), batch(40, 2), padding=8),
    Spec("prefill", 4096, QKV, (Adapter(widths=(32, 64, 8)), Adapter(widths=(128, 16, 0))), batch(400, 2), padding=16),
    Spec("odd", 1200, (40, 24), (Adapter(widths=(24, 3)), Adapter(widths=(100, 0))), batch(50, 2), padding=1),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_adapt(spec: Spec, dtype: torch.dtype):
    case = build(spec, dtype)
    y, again = case.y.clone(), case.y.clone()
    torch.ops.scute.adapt(*case.adapt_args(y))
    torch.ops.scute.adapt(*case.adapt_args(again))
    assert_true(y, case.truth, Truth.adapt)
    assert_same_bits(y, again)
    touched = case.truth.touched().to(y.device)
    assert_same_bits(y[~touched], case.y[~touched])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", TURNS, ids=str)
def test_rotate(spec: Spec, dtype: torch.dtype):
    case = build(spec, dtype)
    out = torch.ops.scute.rotate(*case.rotate_args())
    assert_true(out, case.truth, Truth.rotate)
    assert_same_bits(out, torch.ops.scute.rotate(*case.rotate_args()))
    assert_same_bits(out[:, -spec.padding :], case.x[-spec.padding :].expand(len(spec.slices), -1, -1))


@pytest.mark.parametrize(("tokens", "splits"), [(8, 1), (40, 1), (40, 3), (64, 1), (65, 1), (256, 1), (300, 1)])
def test_linear_with_everything(tokens: int, splits: int, monkeypatch: pytest.MonkeyPatch):
    """Rotation, base GEMM, shrink and expand as one layer launches them, in a graph too. splits: of the GEMM's sums."""
    rule = sizes.gemm_blocks
    monkeypatch.setattr(sizes, "gemm_blocks", lambda *asked: rule(*asked)._replace(splits=splits))
    everything = (*POOL[:8], Adapter(widths=(32, 32, 32)), Adapter(ranks=(8, 8, 8), scale=True, widths=(32, 0, 32)))
    spec = Spec("layer", 4096, QKV, everything, batch(tokens - 2, 10), padding=2, pair_ranks=(64, 256), in_offset=16)
    case = build(spec, torch.float16)
    case.plan.live.fill_(UNBOUNDED)
    y = torch.ops.scute.linear(*case.linear_args())
    inputs = torch.ops.scute.rotate(*case.rotate_args())
    starts = case.layer["slice_starts"]
    parts = [inputs[i] @ case.weight[s:e].T + case.bias[s:e] for i, (s, e) in enumerate(pairwise(starts))]
    expected = torch.cat(parts, dim=1)
    torch.ops.scute.adapt(*case.adapt_args(expected))
    real = slice(0, tokens - 2)
    torch.testing.assert_close(y[real], expected[real], rtol=4e-3, atol=4e-3 * float(expected[real].abs().mean()))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.scute.linear(*case.linear_args())
    for _ in range(3):
        captured.fill_(NAN)
        graph.replay()
        assert_same_bits(captured[real], y[real])


def test_a_captured_graph_serves_the_next_batch():
    """Capture once on one batch, then replay on another: addresses are fixed and the contents are not."""
    spec = SPECS[0]
    case = build(spec, torch.float16)
    case.plan.live.fill_(UNBOUNDED)
    y = case.y.clone()
    torch.ops.scute.adapt(*case.adapt_args(y))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.scute.adapt(*case.adapt_args(y))

    other = Spec(spec.name, 4096, QKV, POOL, batch(33, 9, 7), padding=15, pair_ranks=(64, 256), in_offset=16)
    next_case = build(other, torch.float16)
    case.plan.buffer.copy_(next_case.plan.buffer)
    for name, value in case.layer.items():
        if isinstance(value, torch.Tensor):
            value.copy_(next_case.layer[name])
    case.x.copy_(next_case.x)
    y.copy_(next_case.y)
    graph.replay()

    eager = next_case.y.clone()
    torch.ops.scute.adapt(*next_case.adapt_args(eager))
    assert_same_bits(y, eager)


def test_waits_for_the_kernels_before_it():
    """Launches overlap: each must still see what those before it wrote, whatever their order of work."""
    case = build(SPECS[0], torch.float16)
    expected = torch.zeros_like(case.y)
    torch.ops.scute.adapt(*case.adapt_args(expected))
    busy = torch.zeros(1 << 26, device="cuda")
    x, y = case.x.clone(), torch.empty_like(case.y)
    for _ in range(20):
        case.x.fill_(7)
        y.fill_(9)
        busy.add_(1)
        case.x.copy_(x)
        y.zero_()
        torch.ops.scute.adapt(*case.adapt_args(y))
        result = y.clone()
        assert_same_bits(result, expected)
