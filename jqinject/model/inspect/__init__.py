"""Inspection of a model: its contractions, its quantization errors, and where they come from."""
