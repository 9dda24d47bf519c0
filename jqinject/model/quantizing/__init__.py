"""Rules, and quantizing a float model by them."""
