"""Torch modules only: the blocks, and a model cut into stages."""
