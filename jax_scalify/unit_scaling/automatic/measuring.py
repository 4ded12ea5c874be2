"""Factors of a function, from what it does to unit Gaussians.

The operands of, say, `x - mean(x)` are not independent, and no model of its single equations is
right. A function is therefore run as it is, once, while the model is traced: on unit Gaussians,
from a fixed seed, with a unit Gaussian as the gradient of its result. RMS values are measured, not
standard deviations: it is the second moment that a product with independent weights hands on.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jax_scalify import _compat
from jax_scalify.unit_scaling.automatic.collectives import run_alone
from jax_scalify.unit_scaling.automatic.groups import (
    Group,
    are_alike,
    is_bias,
    moves,
    parameter,
)
from jax_scalify.unit_scaling.automatic.program import Op, Scope, Value, all_scopes

_COMPARISONS = frozenset("eq ne lt le gt ge".split())
_CACHE: dict[Any, Any] = {}
_CACHE_SIZE = 4096
_ELEMENTS = 2**14  # that small functions are run on: the noise of an RMS is below 1%
_COMPILE_FAST = {"xla_backend_optimization_level": 0}
_MANY = 2**20
_LARGE = 1e30  # what stands for infinity, as masks have it


class Measuring:
    """Measures the functions of a program, with samples for its arguments."""

    def __init__(self, scope: Scope):
        self._bounds = _bounds(scope)

    def function(self, group: Group) -> tuple[float, list[float]]:
        """Return the RMS of a function's result and those of its operands' gradients.

        1 stands for what cannot be measured, as RMS values of 0 or of integers.

        Raises:
            Exception: whatever the function raises when it is run by itself.
        """
        moved = [i for i, v in enumerate(group.operands) if v.is_inexact]
        roles = [_role(v, group) for v in group.operands]
        outputs = [i for i, v in enumerate(group.outputs) if v.is_inexact]
        alike = are_alike(group)

        def run(*xs: Any) -> list[Any]:
            env = {v: jnp.zeros(v.shape, v.aval.dtype) for v in group.operands if not v.is_inexact}
            env |= {group.operands[i]: x for i, x in zip(moved, xs, strict=True)}
            for op in group.ops:
                args = [self._value(v, env) for v in op.inputs]
                results = run_alone(op.eqn, args, op.around.axes, alike)
                env.update(zip(op.outputs, results, strict=True))
            return [env[group.outputs[i]] for i in outputs]

        shapes = [group.operands[i].aval for i in moved]
        closed = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in shapes))
        rms, grads = _cached(closed, [roles[i] for i in moved], _measure)
        full = [1.0] * len(group.operands)
        for i, grad in zip(moved, grads, strict=True):
            full[i] = grad
        return rms, full

    def known(self, value: Value) -> float:
        """Return the RMS of a value that is known, on samples."""
        closed = jax.make_jaxpr(lambda: [self._value(value, {})])()
        return _cached(closed, (), _measure_known)

    def _value(self, value: Value, env: dict[Value, Any]) -> Any:
        """Return a value, computed from samples if it is known."""
        if value in env:
            return env[value]
        if _is_constant(value):
            return value.constant
        if value.source is not None:
            out = self._value(value.source, env)
            out = out[0] if value.is_slice else out
            if out.shape != value.shape:  # a device's part
                out = jnp.resize(out, value.shape)
        elif value.op is not None:
            args = [self._value(v, env) for v in value.op.inputs]
            results = run_alone(value.op.eqn, args, value.op.around.axes, True)
            env.update(zip(value.op.outputs, results, strict=True))
            return env[value]
        else:
            out = _sample_known(value.aval, self._bounds.get(value, 2))
        env[value] = out
        return out


def _is_constant(value: Value) -> bool:
    return value.constant is not None and not _compat.is_traced(value.constant)


def _cached(closed: Any, roles: Sequence[str], measure: Any) -> Any:
    """Measure a closed jaxpr, or return what was measured of one that is the same."""
    digest = hashlib.sha256()
    for const in closed.consts:
        if _compat.is_traced(const):
            raise TypeError("it closes over a traced value")
        digest.update(np.asarray(const).tobytes() if _is_plain(const) else repr(const).encode())
    text = re.sub(r" at 0x[0-9a-f]+", "", str(closed.jaxpr))
    key = (text, tuple(roles), digest.digest(), jax.config.jax_enable_x64)
    if key not in _CACHE:
        if len(_CACHE) >= _CACHE_SIZE:
            _CACHE.clear()
        _CACHE[key] = measure(closed, roles)
    return _CACHE[key]


def _is_plain(const: Any) -> bool:
    return not jnp.issubdtype(getattr(const, "dtype", np.float32), jax.dtypes.prng_key)


def _measure_known(closed: Any, roles: Sequence[str]) -> float:
    return float(call_now(lambda: _rms(jex_core.jaxpr_as_fun(closed)()[0])))


def _measure(closed: Any, roles: Sequence[str]) -> tuple[float, list[float]]:
    run = jex_core.jaxpr_as_fun(closed)
    avals, results = closed.in_avals, closed.out_avals
    made = [v.aval for eqn in closed.jaxpr.eqns for v in eqn.outvars]
    largest = max([1, *(getattr(a, "size", 1) for a in (*avals, *made))])
    repeats = max(1, _ELEMENTS // largest)
    rng = np.random.default_rng(0)
    xs = [_sample(rng, role, aval, repeats) for role, aval in zip(roles, avals, strict=True)]
    seeds = [_sample(rng, "gaussian" if a.size > 1 else "one", a, repeats) for a in results]

    def forward(xs: Any) -> Any:
        return [_rms(y) for y in jax.vmap(run)(*_filled(xs, avals, 0))]

    def both(xs: Any, seeds: Any) -> Any:
        out, pull = jax.vjp(jax.vmap(run), *_filled(xs, avals, 0))
        return [_rms(y) for y in out], [_rms(g) for g in pull(_filled(seeds, results, 1))]

    try:
        outs, grads = call_now(both, xs, seeds)
    except (TypeError, ValueError, NotImplementedError):  # it has no reverse-mode derivative
        outs, grads = call_now(forward, xs), [1.0] * len(xs)
    sizes = [a.size for a in results]
    squares = sum(n * float(y) ** 2 for n, y in zip(sizes, outs, strict=True))
    return math.sqrt(squares / max(sum(sizes), 1)), [float(g) for g in grads]


def call_now(fun: Any, *args: Any) -> Any:
    """Compile a function and run it now, even while another one is traced."""
    is_small = all(x is not None for xs in args for x in xs)
    options = _COMPILE_FAST if is_small and jax.default_backend() == "cpu" else None
    return jax.jit(fun).lower(*args).compile(options)(*args)


def _rms(x: Any) -> Any:
    """RMS of the finite elements."""
    magnitude = jnp.abs(x).astype(jnp.float32)
    counts = jnp.isfinite(magnitude) & (magnitude < _LARGE)
    total = jnp.sum(jnp.where(counts, magnitude, 0) ** 2)
    return jnp.sqrt(total / jnp.maximum(jnp.sum(counts, dtype=jnp.float32), 1))


def _sample(rng: np.random.Generator, role: str, aval: Any, repeats: int) -> np.ndarray | None:
    """Return samples; None if they are many and are better drawn on the device."""
    shape = (repeats, *aval.shape)
    if role != "gaussian":
        return np.full(shape, float(role == "one"), aval.dtype)
    if aval.size > _MANY:
        return None
    values = _gaussian(rng, shape)
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        values = (values + 1j * _gaussian(rng, shape)) / math.sqrt(2)
    return values.astype(aval.dtype)


def _gaussian(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return the quantiles of a Gaussian in random order: less noise than random numbers."""
    size = math.prod(shape)
    points = np.linspace(-6, 6, 2401)
    shares = np.cumsum(np.exp(-(points**2) / 2))
    values = np.interp((np.arange(size) + 0.5) / size, shares / shares[-1], points + 0.0025)
    return rng.permutation(values).reshape(shape).astype(np.float32)


def _filled(xs: Sequence[Any], avals: Sequence[Any], seed: int) -> list[Any]:
    """Draw the samples that are still missing."""
    keys = jax.random.split(jax.random.key(seed), max(len(xs), 1))
    return [
        jax.random.normal(key, (1, *aval.shape), jnp.float32).astype(aval.dtype) if x is None else x
        for x, aval, key in zip(xs, avals, keys)
    ]


def _sample_known(aval: Any, bound: int) -> Any:
    """Return integers below a bound, True, or a key."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(jnp.empty((), aval.dtype)))
        return jnp.broadcast_to(jax.random.key(0, impl=impl), aval.shape)
    if aval.dtype == bool:
        return np.ones(aval.shape, bool)
    values = np.random.default_rng(0).integers(0, bound, aval.shape)
    return values.astype(aval.dtype)


def _role(value: Value, group: Group) -> str:
    """Tell what an operand is at initialisation: a gain of ones, a bias of zeros, or Gaussian."""
    if parameter(value) is None:
        return "gaussian"
    aliases = {value}
    for op in group.ops:
        taken = [v for v in op.inputs if v in aliases]
        if not taken:
            continue
        if moves(op.name):
            aliases.update(op.outputs)
            continue
        if len(op.inputs) != 2 or value.size >= max(
            v.size for v in group.root.outputs + op.outputs
        ):
            return "gaussian"
        left, right = op.inputs
        other = right if left is taken[0] else left
        if op.name in ("mul", "div"):
            return "one"
        return "zero" if op.name in ("add", "sub") and is_bias(taken[0], other, op) else "gaussian"
    return "gaussian"


def _bounds(scope: Scope) -> dict[Value, int]:
    """Below which numbers integer arguments have to stay: rows of tables, numbers of classes."""
    bounds: dict[Value, int] = {}

    def bind(value: Value, bound: int) -> None:
        pending, seen = [value], set()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            if value.source is not None:
                pending.append(value.source)
            elif value.op is not None:
                pending += value.op.inputs
            elif not _is_constant(value):
                bounds[value] = max(1, min(bound, bounds.get(value, bound)))

    for op in (op for s in all_scopes(scope) for op in s.ops):
        if op.name == "gather" and op.inputs[1].is_known:
            axes = op.eqn.params["dimension_numbers"].start_index_map
            bind(op.inputs[1], min([op.inputs[0].shape[a] for a in axes], default=1))
        elif op.name in _COMPARISONS and all(v.is_known for v in op.inputs):
            _bind_comparison(op, bind)
    return bounds


def _bind_comparison(op: Op, bind: Any) -> None:
    """A label that is compared with all classes is one of them."""
    for value in op.inputs:
        repeats = op.outputs[0].size // max(value.size, 1)
        if repeats > 1:
            bind(value, repeats)
