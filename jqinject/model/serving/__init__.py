"""A model as one compiled function that holds its own state."""
