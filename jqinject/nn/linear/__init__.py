"""Dense layers, einsum, embedding."""
