"""Training: gradients with backward statistics, steps, losses of bit widths."""
