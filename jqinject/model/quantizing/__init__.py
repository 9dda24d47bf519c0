"""Rules, and the float model that becomes a quantized one by them."""
