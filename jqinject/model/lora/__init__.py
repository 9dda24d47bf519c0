"""Low-rank adapters: trainable updates beside frozen weights."""
