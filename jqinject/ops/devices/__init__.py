"""Meshes, mapped axes, processes."""
