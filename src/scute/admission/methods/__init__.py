"""One module per PEFT method: its config, its tensors, and how they become members of the normal form."""
