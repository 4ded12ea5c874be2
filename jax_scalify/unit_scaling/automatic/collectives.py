"""Collectives: what they do to scales, and what stands for them where there is one device only.

A `psum` over `n` devices of products is a sum of `n` independent terms, and so is the gradient of
what all devices have. Inside of a function, such as a normalisation whose mean is one over all
devices, the devices count as alike: `psum(x)` is `n * x`, and a mean of means is the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.base.jaxprs import all_equations, applied, evaluate
from jax_scalify.unit_scaling.automatic.program import run_equation
from jax_scalify.unit_scaling.scaling import scale_bwd, scale_fwd

_SUMS = frozenset("psum psum_invariant".split())
_COPIES = frozenset("pvary pcast pbroadcast".split())
_OTHERS = frozenset("pmax pmin ppermute all_to_all all_gather all_gather_invariant".split())
_COLLECTIVES = _SUMS | _COPIES | _OTHERS | {"reduce_scatter", "axis_index"}


def is_collective(eqn: Any) -> bool:
    """Return whether an equation speaks with other devices."""
    return eqn.primitive.name in _COLLECTIVES and bool(_names(eqn))


def is_sum_over_devices(eqn: Any) -> bool:
    """Return whether an equation adds up arrays of several devices."""
    return eqn.primitive.name in _SUMS | {"reduce_scatter"} and is_collective(eqn)


def is_copied_to_devices(eqn: Any) -> bool:
    """Return whether gradients of an operand are added up over devices."""
    return eqn.primitive.name in _COPIES and is_collective(eqn)


def count_devices_without(spec: Any, params: dict[str, Any]) -> int:
    """Return how many devices of a `shard_map` have the same part of an array."""
    named = {n for entry in spec for n in (entry if isinstance(entry, tuple) else (entry,))}
    sizes = params["mesh"].shape
    return math.prod(sizes[n] for n in params["newly_manual_axes"] if n not in named)


def run_alone(
    eqn: Any, args: Sequence[Any], axes: Mapping[Any, int], are_alike: bool
) -> Sequence[Any]:
    """Evaluate an equation on one device.

    Args:
        eqn: of a jaxpr.
        args: its operands.
        axes: sizes of the axes of meshes, by name, as far as they are known.
        are_alike: whether the other devices have the same data, or independent data.
    """
    if is_collective(eqn):
        return _simulate(eqn, args, axes, are_alike)
    call = applied(eqn)
    if call is not None and any(map(is_collective, all_equations(getattr(call, "jaxpr", call)))):
        return evaluate(call, args, lambda inner, xs: run_alone(inner, xs, axes, are_alike))
    return run_equation(eqn, args)


def _simulate(eqn: Any, args: Sequence[Any], axes: Mapping[Any, int], are_alike: bool) -> list[Any]:
    name = eqn.primitive.name
    if name == "axis_index":
        return [jnp.zeros((), jnp.int32)]
    count = _count_devices(eqn, axes)
    terms, results = count if are_alike else math.sqrt(count), []
    for x, out in zip(args, eqn.outvars, strict=True):
        if jnp.issubdtype(out.aval.dtype, jnp.inexact):
            if name in _SUMS:
                x = scale_fwd(x, terms)
            elif name in _COPIES:
                x = scale_bwd(x, math.sqrt(count))
            elif name == "reduce_scatter":  # only a part of `x` has a gradient here
                x = scale_bwd(scale_fwd(x, terms), math.sqrt(count))
        results.append(jnp.resize(x, out.aval.shape))  # repeated, or cut
    return results


def _count_devices(eqn: Any, axes: Mapping[Any, int]) -> int:
    """How many devices take part."""
    groups = eqn.params.get("axis_index_groups")
    if groups is not None:
        return len(groups[0])
    return math.prod(axes[n] if n in axes else jax.lax.axis_size(n) for n in _names(eqn))


def _names(eqn: Any) -> tuple[Any, ...]:
    """The axes of meshes; those of arrays are integers."""
    params = eqn.params
    axes = params["axes"] if "axes" in params else params.get("axis_name", ())
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    return tuple(a for a in axes if not isinstance(a, int))
