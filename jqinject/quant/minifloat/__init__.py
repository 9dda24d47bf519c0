"""Ready-made quantizers to minifloats."""
