"""What comes in from a checkpoint, and what is assembled again from it."""
