"""Contractions of quantized tensors."""
