"""How low-bit numbers are multiplied and summed, without a derivative."""
