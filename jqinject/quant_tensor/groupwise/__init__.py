"""Quantized tensors with scales for groups: each format, cut into groups."""
