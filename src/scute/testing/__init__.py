"""Small models, amplified adapters and the PEFT library as the reference: what agreement is measured with."""
