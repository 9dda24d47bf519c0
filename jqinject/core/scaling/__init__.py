"""Scales: from a statistic, a parameter or a constant to the size of a step."""
