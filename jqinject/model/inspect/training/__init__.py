"""Bytes of training: what a step keeps."""
