"""Why a checkpoint cannot be read, or does not fit."""

from __future__ import annotations

CONTRADICTION = (
    "\n  cure: fetch config.json and the files again, of one revision; they contradict one another"
)
"""The end of messages about tensors that fit neither one another nor the settings."""


class CheckpointError(ValueError):
    """A checkpoint is broken, contradicts itself, or is of a kind that is not known; the message names the tensor."""


class MissingLibraryError(ImportError):
    """A checkpoint needs a library that is not installed; the message says how to install it."""
