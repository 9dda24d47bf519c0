"""Statistics of a tensor over axes, groups and devices."""
