"""Training in low bits: quantizers made for a scheme's operands, and the schemes.

Their gradients pass unchanged, their scales are those of the tensor at hand, and their payload is what is kept for the
backward pass.
"""
