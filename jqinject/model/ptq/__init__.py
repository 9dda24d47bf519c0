"""Quantization after training: calibration, corrections, learned rounding."""
