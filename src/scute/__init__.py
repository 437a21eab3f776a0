"""Scute serves the adapters of every PEFT method of one base model in one vLLM batch, exactly."""

__version__ = "0.1.0"
