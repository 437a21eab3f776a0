"""The least time that the kernels of a problem can take, by the byte model."""

from scute.costs import Counting, Device, Slots, layer_bytes
from scute.costs.launches import launches
from scute.costs.traffic import live_routes
from scute.tuning.problems import Problem


def floor_us(problem: Problem, figures: Device) -> float:
    """Microseconds of one layer: bytes over the bandwidth, and launches; with a rotation, the base GEMM's weights too.

    Raises UnknownFigure where the device's bandwidth or launch is not known.
    """
    adapter, shape, itemsize = problem.adapter, problem.shape, problem.dtype.itemsize
    own = Slots(
        adapter.rank,
        adapter.scale,
        adapter.shift,
        adapter.rotation_width,
        "pair" if adapter.shared else None,
        problem.shared_rank if adapter.shared else 0,
    )
    rows = problem.slots_of_rows()
    uses = [((own,) * len(shape.slices), rows.count(tenant)) for tenant in range(problem.tenants)]
    moved = layer_bytes(shape, uses, Counting(factor=itemsize)).total()
    if adapter.rotation_width:
        moved += shape.in_features * shape.out_features * itemsize
    made = launches(shape, live_routes(uses), problem.tokens, figures.fuses_gemm)
    return 1e6 * (moved / figures.bytes_per_second + made * figures.launch_seconds)
