"""Contractions whose operands have quantizers, forward and backward."""
