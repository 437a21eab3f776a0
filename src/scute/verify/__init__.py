"""Adapters in a real engine and in the PEFT library, side by side. Needs `peft`, which nothing that serves needs."""
