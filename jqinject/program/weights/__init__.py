"""Parameters in a program: followed to their contractions, and contracted there."""
