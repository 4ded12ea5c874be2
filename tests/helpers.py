"""What many tests share: operands, values in float64, plain references."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify import ScaledArray
from jax_scalify.interpreter import registry


def scaled(data, scale=1.0, dtype=jnp.float32):
    """A `ScaledArray` with this data, and with a dynamic scale."""
    return ScaledArray(jnp.asarray(data, dtype), jnp.asarray(scale, jnp.float32))


def is_scaled(x):
    """Whether a leaf is a `ScaledArray`."""
    return isinstance(x, ScaledArray)


def leaves(tree):
    """The leaves of a tree; a `ScaledArray` is one."""
    return jax.tree.leaves(tree, is_leaf=is_scaled)


def value(x):
    """What an array means, in float64 or complex128; integers and bools stay."""
    if not is_scaled(x):
        x = np.asarray(x)
        return _wide(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x
    scale = np.asarray(x.scale, np.float64)
    missing = x.ndim - scale.ndim if scale.ndim else 0  # a scale lies along the leading axes
    return _wide(np.asarray(x.data)) * scale.reshape(scale.shape + (1,) * missing)


def values(tree):
    """What the arrays of a tree mean, see `value`."""
    return jax.tree.map(value, tree, is_leaf=is_scaled)


def _wide(x):
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def in_float64(fun, *args):
    """The results of a plain function, compiled and called in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(value(a)), args)
        return jax.tree.map(lambda out: np.asarray(out, np.float64), jax.jit(fun)(*wide))


def assert_close(got, want, tolerance=2e-5):
    """Compare trees, relative to the largest element of each leaf."""
    got = values(got)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * np.abs(w).max(initial=0))


def compiled(fun, *args):
    """Call a function that is compiled without costly passes, with `--full` too."""
    return jax.jit(fun).lower(*args).compile({"xla_backend_optimization_level": 0})(*args)


def in_one_program(fun, rows):
    """Call a function on rows of operands, compiled once for all: most of a test is compilation.

    Rows of equal shapes, dtypes and static scales are the same part of the program.
    """
    parts = {}
    for i, row in enumerate(rows):
        avals = tuple(jax.typeof(x) for x in jax.tree.leaves(row))
        parts.setdefault((jax.tree.structure(row), avals), []).append(i)
    program = jax.jit(lambda rows: [fun(*row) for row in rows])
    results = [None] * len(rows)
    for k in range(max(map(len, parts.values()))):
        picked = [same[min(k, len(same) - 1)] for same in parts.values()]
        for i, result in zip(picked, program([rows[i] for i in picked]), strict=True):
            results[i] = result
    return results


def replace_rule(monkeypatch, primitive, rule):
    """Let another function be the rule of a primitive during a test."""
    replaced = dataclasses.replace(registry._rules[primitive], rule=rule)
    monkeypatch.setitem(registry._rules, primitive, replaced)
