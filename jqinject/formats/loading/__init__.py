"""From a checkpoint's matrices to the frozen weights of a model."""
