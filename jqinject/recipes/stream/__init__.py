"""Calibration data on its way through a model."""
