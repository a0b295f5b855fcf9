"""Filling tensors from a step directory, or from the weights of another program."""
