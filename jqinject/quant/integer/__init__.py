"""Ready-made quantizers to integers."""
