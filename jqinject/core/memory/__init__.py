"""What a quantizer remembers: constants, parameters, running statistics, ranges of batches."""
