"""Attention, and its cache of keys and values."""
