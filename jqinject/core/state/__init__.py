"""The state of quantizers: variables, histories, collected ranges."""
