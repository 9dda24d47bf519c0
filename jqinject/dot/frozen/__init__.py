"""Low-bit numbers that are stored in the place of a weight."""
