"""`python -m scute.demo`: adapters of every method in one vLLM batch on the CPU, each held against the PEFT library."""
