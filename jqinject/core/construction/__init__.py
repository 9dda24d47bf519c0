"""How components are constructed: checked arguments, attributes set at once."""
