"""The arithmetic of a calibration on a clock that only pretends, and a calibration of this CPU."""

import json

import pytest
import torch

from scute.costs import Device, find_device
from scute.costs.calibration import COPIES, COPY_BYTES, L2_COPIES, LAUNCHES, Calibration, describe_device, store
from scute.tuning.timing import Samples


class Pretended:
    """Every recorded work takes the next of the given milliseconds, and is run once to see that it can be."""

    device = torch.device("cpu")

    def __init__(self, *milliseconds: float) -> None:
        self.left = list(milliseconds)

    def record(self, work):
        work()
        return self.left.pop(0)

    def time(self, *recorded, repeats):
        assert repeats >= 3
        return [Samples(ms, ms, ms) for ms in recorded]


def test_arithmetic():
    told = []
    clock = Pretended(2.0, 0.5, 0.25, 0.75, 0.2)
    found = Calibration(clock, progress=lambda *step: told.append(step)).run(Device("GPU", l2_mib=4, capability="9.0"))
    assert found.bandwidth_gb_s == pytest.approx(2 * COPY_BYTES * COPIES / 2e-3 / 1e9)
    l2 = 4 * 2**20
    rates = [2 * (l2 // part) * L2_COPIES / seconds / 1e9 for part, seconds in ((16, 5e-4), (8, 2.5e-4), (4, 7.5e-4))]
    assert found.l2_bandwidth_gb_s == pytest.approx(max(rates))
    assert found.launch_us == pytest.approx(200 / LAUNCHES)
    assert (found.name, found.capability) == ("GPU", "9.0")
    assert [step for _, *step in told] == [[done, 5] for done in range(5)]


def test_it_measures_until_its_time_is_over(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    clock = Pretended(1.0, 1.0)
    asked = []
    timed = clock.time
    monkeypatch.setattr(clock, "time", lambda *r, repeats: asked.append(r) or timed(*r, repeats=repeats))
    Calibration(clock, seconds=8).run(Device("CPU"))
    assert len(asked) == 2 * 4


def test_what_is_stored_is_found(cache):
    measured = Device("My GPU", bandwidth_gb_s=10.0, launch_us=1.5)
    stored, path = store(measured)
    assert path == cache / "scute" / "devices" / "my_gpu.json"
    data = json.loads(path.read_text())
    assert set(data) == {"name", "bandwidth_gb_s", "launch_us", "sources"}
    found = find_device("my gpu")
    assert (found.bandwidth_gb_s, found.launch_us, found.l2_bandwidth_gb_s) == (10.0, 1.5, None)
    assert "scute calibrate" in found.sources["launch_us"]
    assert stored == found


def test_a_cpu_has_no_l2_to_measure():
    described = describe_device(torch.device("cpu"))
    assert described.name.startswith("CPU")
    assert described.l2_mib is None
