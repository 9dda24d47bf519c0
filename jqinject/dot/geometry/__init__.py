"""Axes of contractions: dimension numbers, equations, patches, tiles."""
