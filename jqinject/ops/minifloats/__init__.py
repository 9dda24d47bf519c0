"""Minifloats and tables of numbers: formats, grids, codes."""
