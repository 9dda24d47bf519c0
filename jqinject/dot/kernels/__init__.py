"""Multiplying and summing low-bit numbers, without derivatives."""
