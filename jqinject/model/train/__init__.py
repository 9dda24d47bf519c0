"""Training: gradients with backward statistics, steps, bit-width losses."""
