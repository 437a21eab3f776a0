"""Constants of devices: where they are from, what goes before what, and the time of bytes and launches."""

import json
import re
from pathlib import Path

import pytest

from scute.costs import Device, Route, Traffic, UnknownFigure, find_device, known_devices
from scute.costs.device import file_of, user_folder
from scute.kernels import sizes

PAGE = (Path(__file__).parents[2] / "docs" / "byte_model.md").read_text()
KNOWN = Device("x", bandwidth_gb_s=100, l2_bandwidth_gb_s=1000, launch_us=2, l2_mib=1)


def test_every_figure_of_the_package_has_a_source():
    devices = known_devices()
    assert set(devices) == {"NVIDIA RTX A6000", "NVIDIA A100-SXM4-80GB", "NVIDIA H200"}
    for device in devices.values():
        for figure in ("bandwidth_gb_s", "l2_bandwidth_gb_s", "launch_us", "l2_mib", "memory_gib", "capability"):
            assert getattr(device, figure) is None or figure in device.sources


def test_the_page_lists_the_figures():
    rows = re.findall(r"^\| (NVIDIA [^|]+?) \| ([^|]+?) \| ([^|]+?) \| ([^|]+?) \|", PAGE, re.MULTILINE)
    told = {name: figures for name, *figures in rows}
    for name, device in known_devices().items():
        figures = device.bandwidth_gb_s, device.l2_bandwidth_gb_s, device.launch_us
        assert told.pop(name) == ["not known" if value is None else f"{value:g}" for value in figures]
    assert not told


def test_seconds_are_bytes_over_bandwidth_and_launches():
    layer = Traffic({Route.LOW_RANK: 10**9, Route.ACTIVATIONS: 2**20}, 5)
    assert KNOWN.seconds(layer) == pytest.approx({"low-rank": 0.01, "x and y": 2**20 / 1e12, "launches": 1e-5})


def test_activations_that_l2_does_not_hold_move_at_the_bandwidth_of_memory():
    assert KNOWN.bandwidth(2**20) == 1e12
    assert KNOWN.bandwidth(2**20 + 1) == 1e11
    assert Device("x", bandwidth_gb_s=100).bandwidth(1) == 1e11
    assert Device("x", bandwidth_gb_s=100, l2_mib=1).bandwidth(1) == 1e11


def test_what_is_not_known_is_told():
    with pytest.raises(UnknownFigure, match="launch_us of x"):
        Device("x", bandwidth_gb_s=1).seconds(Traffic({}, 1))
    with pytest.raises(UnknownFigure, match="bandwidth_gb_s"):
        find_device("a100").seconds(Traffic({Route.LOW_RANK: 1}, 0))


def test_names_match_in_part_if_only_one_does():
    assert find_device("rtx a6000").name == find_device("NVIDIA_RTX_A6000").name == "NVIDIA RTX A6000"
    for name in ("nvidia", "t4"):
        with pytest.raises(ValueError, match=name):
            find_device(name)


def test_measured_figures_go_before_the_packages_one_by_one(cache):
    write(cache, {"name": "NVIDIA H200", "bandwidth_gb_s": 4000, "sources": {"bandwidth_gb_s": "here"}})
    device = find_device("h200")
    assert (device.bandwidth_gb_s, device.launch_us, device.memory_gib) == (4000, 1.21, 139)
    assert device.sources["bandwidth_gb_s"] == "here"
    assert "launch_us" in device.sources


@pytest.mark.parametrize(
    "damaged",
    [
        [],
        {},
        {"name": "x", "speed": 1},
        {"name": "x", "launch_us": "1"},
        {"name": "x", "launch_us": 0},
        {"name": "x", "launch_us": float("inf")},
        {"name": "x", "launch_us": True},
        {"name": "x", "launch_us": None},
        {"name": "x", "capability": 9.0},
        {"name": "x", "capability": "9"},
        {"name": "x", "sources": ["here"]},
        {"name": "x", "sources": {"launch_us": 1}},
    ],
    ids=str,
)
def test_a_damaged_file_is_named(cache, damaged):
    path = write(cache, damaged)
    with pytest.raises(ValueError, match=str(path)):
        known_devices()


def test_the_folder_is_beside_the_one_of_block_sizes():
    assert user_folder().parent == sizes.user_folder().parent
    assert file_of(user_folder(), "NVIDIA H200").name == sizes.file_of(user_folder(), "NVIDIA H200").name


def write(cache, data):
    folder = cache / "scute" / "devices"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "it.json"
    path.write_text(json.dumps(data))
    return path
