"""Checkpoint files: tensors by name, read from a memory map when they are asked for."""
