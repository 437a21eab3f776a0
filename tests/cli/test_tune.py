"""`scute tune` without a GPU: its options, its refusals, and the shapes that it reads from a base model."""

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from scute.cli.main import app
from scute.cli.tune import print_entries
from scute.tuning.layers import LayerShape
from scute.tuning.shapes import fuse, read_shapes
from scute.tuning.table import Entry


def test_shapes_of_a_base_model(base):
    shapes = {shape.name: shape for shape in read_shapes(base)}
    assert list(shapes) == ["qkv", "o", "gate_up", "down"]
    assert len(shapes["qkv"].slices) == 3
    halves = {shape.name: shape for shape in read_shapes(base, 2)}
    for name in ("qkv", "gate_up"):
        assert halves[name].in_features == shapes[name].in_features
        assert [2 * width for width in halves[name].slices] == list(shapes[name].slices)
    for name in ("o", "down"):
        assert 2 * halves[name].in_features == shapes[name].in_features
        assert halves[name].slices == shapes[name].slices


def test_projections_that_are_not_fused():
    sizes = {"a.q_proj": (8, 8), "a.k_proj": (8, 4), "a.dense": (8, 6)}
    assert list(fuse(sizes, 1)) == [LayerShape("q", 8, (8,)), LayerShape("k", 8, (4,)), LayerShape("dense", 8, (6,))]
    with pytest.raises(ValueError, match="cannot cut into 4"):
        list(fuse(sizes, 4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would tune")
def test_without_a_gpu(base):
    result = CliRunner().invoke(app, ["tune", "--base", str(base)])
    assert result.exit_code == 1
    assert "no CUDA GPU" in result.output


@pytest.mark.parametrize("wrong", [("--tokens", "x"), ("--dtype", "int8"), ("--tensor-parallel-size", "3")])
def test_wrong_options(base, wrong):
    assert CliRunner().invoke(app, ["tune", "--base", str(base), *wrong]).exit_code == 2


def test_entries_are_printed(capsys):
    print_entries([Entry("gemm_blocks", {"tokens": (33, 64)}, {"rows": 64}, ["qkv"], 20.0, 10.0, 0.5, 7, 1)])
    assert "0.50" in capsys.readouterr().out


def test_help_is_quick():
    code = "import sys, scute.cli.main as m; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
