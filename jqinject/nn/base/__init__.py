"""What quantized layers share."""
