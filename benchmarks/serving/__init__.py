"""Serving times of engines side by side on one GPU, each held against the PEFT library before it is timed."""
