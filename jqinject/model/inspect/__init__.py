"""What a model contracts, how large the errors are, and where they come from."""
