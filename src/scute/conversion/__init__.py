"""Conversion of adapters to plain LoRA, and what that loses. Needs neither PEFT nor vLLM."""

from scute.conversion.convert import convert
from scute.conversion.distillation import Training
from scute.conversion.report import Conversion, Layer
from scute.conversion.settings import Method, Settings

__all__ = ["Conversion", "Layer", "Method", "Settings", "Training", "convert"]
