"""A model's call as a program: tracing it, and the marks that its modules leave meanwhile."""
