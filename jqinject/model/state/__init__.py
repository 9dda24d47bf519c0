"""Loading checkpoints, and re-assembling quantizers from the loaded weights."""
