"""Layers with formats of their own for both passes."""

from jax_scalify.nn.dot import dot_general

__all__ = ["dot_general"]
