"""The constants of the byte model, measured on this device: bandwidth and the cost of a launch in a graph."""

from rows import Environment

from scute.costs.calibration import Calibration, describe_device
from scute.tuning.timing import Clock
from steps.measure import BANDWIDTH, LAUNCH
from steps.record import Constants


def measure(clock: Clock, environment: Environment) -> Constants:
    """On the CPU, the constants of the H200."""
    if clock.device.type != "cuda":
        return Constants(
            environment=environment, bandwidth=BANDWIDTH, cached_bandwidth=BANDWIDTH, l2_bytes=0, launch=LAUNCH
        )
    found = Calibration(clock).run(describe_device(clock.device))
    return Constants(
        environment=environment,
        bandwidth=found.bytes_per_second,
        cached_bandwidth=1e9 * (found.l2_bandwidth_gb_s or 0),
        l2_bytes=round((found.l2_mib or 0) * 2**20),
        launch=1e3 * found.launch_seconds,
    )
