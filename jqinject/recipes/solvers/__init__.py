"""Algorithms that choose low-bit numbers for a weight."""
