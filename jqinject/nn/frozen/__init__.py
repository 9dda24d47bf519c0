"""Layers that serve low-bit numbers in the place of their weights."""
