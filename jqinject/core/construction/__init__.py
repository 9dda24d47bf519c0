"""Construction of components: checked arguments, attributes set at once."""
