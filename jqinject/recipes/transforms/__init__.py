"""What may be changed in a model without changing its function."""
