"""Steps of a recipe."""
