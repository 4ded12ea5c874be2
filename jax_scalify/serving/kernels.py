"""Which leaves are weights of matmuls, which of their axes are summed over, and which are FP8."""

from __future__ import annotations

import re
from typing import Any

import jax

from jax_scalify.fp8 import Matmul, hidden_layers

# What is added or looked up, by the last word of a leaf's name, and of the module of a `weight`.
_LOOKED_UP = r"bias(es)?|pos|positions?|pe|emb|embeddings?|tok|tokens?|cls|table|codebook|shared"
_ADDED = r"scale|gamma|beta|mean|var|latents?|queries|mask|cache|state|log|decay|freqs"
_TABLE = re.compile(rf"(^|_)({_LOOKED_UP}|{_ADDED}|norm|ln)_?\d*$|^b(_\w+|[qkvo]|qkv)?$", re.I)
_TABLE_MODULE = re.compile(rf"(^|_)({_LOOKED_UP}|norm|ln)_?\d*$", re.I)

_PART = r"(_?(proj(ection)?|kernel|weight))?$"
_INPUT = re.compile(rf"(w_?)?(q|k|v|query|key|value|kv|qkv){_PART}", re.I)
_FUSED = re.compile(rf"(w_?)?q?kv{_PART}", re.I)
_OUTPUT = re.compile(rf"(w_?)?(o|out|output){_PART}|c_proj$", re.I)
_ATTENTION = re.compile(r"att(n|ention)", re.I)
_CONVOLUTION = re.compile(r"conv(?!ert)", re.I)
_EXPERTS = re.compile(r"experts?|moe", re.I)
_LARGEST_WINDOW = 16  # of a convolution along one axis, whose weight is `(out, in, window)`


def linear_kernels(path: str, leaf: Any) -> bool:
    """Return whether a leaf is a weight that `jsa.fp8_matmuls` multiplies in FP8 by default.

    Its path must pass `jsa.fp8.hidden_layers`, the default of `jsa.fp8_matmuls`: it is not an
    embedding, a head or a router. The leaf must be a kernel. A kernel has rank 2, or is a kernel of
    attention, of experts or of stacked layers. Biases, tables such as `pos`, and convolutions with
    windows of more than one pixel are not selected.

    Names cannot tell everything: `jsa.serving.fp8_kernels` traces the model instead.

    Example:
        >>> jsa.serving.linear_kernels("block_0/attn/query/kernel", jnp.ones((8, 2, 4)))
        True
        >>> jsa.serving.linear_kernels("lm_head/kernel", jnp.ones((8, 4)))
        False
    """
    if not is_kernel(path, leaf.ndim) or not _is_matmul(path, leaf.shape):
        return False
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return hidden_layers(Matmul("", shape, shape, "", path, (((0,), (0,)), ((), ()))))


def is_kernel(path: str, ndim: int) -> bool:
    """Return whether a leaf is multiplied or convolved with activations, by its name and rank."""
    *_, module, last = ("", "", *path.split("/"))
    if ndim < 2:
        return False
    if last in ("weight", "weights", "w"):
        return not _TABLE_MODULE.search(module)
    return last == "kernel" or not _TABLE.search(last)


def merged_outputs(path: str, ndim: int) -> int | None:
    """Return how many trailing axes of an attention kernel or bias are its output features.

    A kernel of queries, keys or values is `(in, heads, head_dim)`, and its bias
    `(heads, head_dim)`. The kernel of the output is `(heads, head_dim, out)`. With fused queries,
    keys and values, `(in, 3, heads, head_dim)`. None for other leaves.
    """
    is_bias = path.rpartition("/")[2] == "bias"
    role = _role(path)
    if role == "input" and ndim == 3 - is_bias:
        return 2
    if role == "input" and ndim == 4 - is_bias and _FUSED.match(_layer(path)):
        return 3
    return 1 if role == "output" and ndim == 3 and not is_bias else None


def contracted_axes(path: str, ndim: int) -> list[tuple[int, ...]]:
    """Return the axes that a matmul sums over, once for each way to read the shape of a kernel.

    A kernel of rank 3 is one of attention, or of stacked layers or experts.
    """
    if path.endswith("weight"):  # Equinox has output features first, as PyTorch
        return [tuple(range(1, ndim))]
    if ndim < 3:
        return [tuple(range(ndim - 1))]
    outputs = merged_outputs(path, ndim)
    if outputs is not None:
        return [tuple(range(ndim - outputs)), (ndim - 2,)]
    return [(ndim - 2,) if _may_be_stacked(path, ndim) else tuple(range(ndim - 1))]


def is_stacked(path: str, shape: tuple[int, ...]) -> bool:
    """Return whether a kernel is a stack of kernels, of layers or experts, and no convolution."""
    return len(shape) > 2 and _may_be_stacked(path, len(shape)) and not _is_pixel(path, shape)


def _layer(path: str) -> str:
    """The name of a layer: that of the module, or of a leaf that is a layer by itself."""
    *_, module, last = ("", "", *path.split("/"))
    return module if last in ("kernel", "weight", "weights", "w", "bias") else last


def _role(path: str) -> str | None:
    """Return whether a leaf belongs to the "input" or the "output" of attention."""
    is_attention = bool(_ATTENTION.search(path))
    if _CONVOLUTION.search(path) and not is_attention:
        return None
    name = _layer(path)
    return "input" if _INPUT.match(name) else "output" if _OUTPUT.match(name) else None


def _may_be_stacked(path: str, ndim: int) -> bool:
    if _ATTENTION.search(path) or _EXPERTS.search(path):
        return True
    return ndim == 3 and not _CONVOLUTION.search(path)


def _is_pixel(path: str, shape: tuple[int, ...]) -> bool:
    """Return whether the window of a convolution's kernel is one pixel."""
    return all(n == 1 for n in (shape[2:] if path.endswith("weight") else shape[:-2]))


def _is_matmul(path: str, shape: tuple[int, ...]) -> bool:
    """Return whether a kernel is one of a matmul or of a convolution that is a matmul."""
    ndim, role, last = len(shape), _role(path), path.rpartition("/")[2]
    if ndim == 2 or (role and ndim == 3) or (role == "input" and ndim == 4):
        return True
    if _is_pixel(path, shape):
        return last in ("kernel", "weight")  # not `probe`, of shape (1, 1, width)
    if not _may_be_stacked(path, ndim):
        return False
    return last != "weight" or ndim > 3 or shape[2] > _LARGEST_WINDOW
