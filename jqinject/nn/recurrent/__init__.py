"""Quantized recurrent cells, and layers of them over whole sequences."""
