"""The byte model: what adapters cost in bytes, launches, time and memory, from shapes alone. Imports no torch."""

from scute.costs.arms import Arm
from scute.costs.base import Base, read_base
from scute.costs.device import Device, UnknownFigure, find_device, known_devices
from scute.costs.layers import FusedLayer, LayerShape, fused_layers
from scute.costs.prediction import Fit, Prediction, predict
from scute.costs.slots import PAPER, Counting, Piece, Slots
from scute.costs.step import Step, spread, step_traffic
from scute.costs.tenant import Tenant, pair_bytes, read_tenant
from scute.costs.traffic import Route, Traffic, layer_bytes

__all__ = [
    "PAPER",
    "Arm",
    "Base",
    "Counting",
    "Device",
    "Fit",
    "FusedLayer",
    "LayerShape",
    "Piece",
    "Prediction",
    "Route",
    "Slots",
    "Step",
    "Tenant",
    "Traffic",
    "UnknownFigure",
    "find_device",
    "fused_layers",
    "known_devices",
    "layer_bytes",
    "pair_bytes",
    "predict",
    "read_base",
    "read_tenant",
    "spread",
    "step_traffic",
]
