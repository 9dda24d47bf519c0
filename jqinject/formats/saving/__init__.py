"""From the frozen weights of a model to the files of compressed-tensors."""
