"""Layers that serve low-bit numbers instead of weights."""
