"""Factors of products, convolutions and look-ups: sums of products of independent numbers.

With `n` terms in each element of a result, or of an operand's gradient, its factor is 1/√n.

Source: Blake et al., *Unit Scaling* (2023), table A.2; *u-µP* (2024), appendix B.
"""

from __future__ import annotations

import math

from jax_scalify.unit_scaling.automatic.program import Op


def count_terms(op: Op) -> int:
    """Return the number of products of elements in all results together."""
    out = op.outputs[0]
    if op.name == "gather":
        return out.size
    params = op.eqn.params
    lhs, rhs = op.inputs
    if op.name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return out.size * math.prod(lhs.shape[i] for i in contracted)
    numbers = params["dimension_numbers"]
    windows = math.prod(_count_windows(op, axis) for axis in range(len(numbers.lhs_spec) - 2))
    results = out.shape[numbers.out_spec[0]] * out.shape[numbers.out_spec[1]]
    return results * windows * rhs.shape[numbers.rhs_spec[1]]


def _count_windows(op: Op, axis: int) -> int:
    """Return how many pairs of a result and an element of the window meet an element of the input.

    Along one spatial axis; padding and the holes of a dilated input do not count.
    """
    params, numbers = op.eqn.params, op.eqn.params["dimension_numbers"]
    size = op.inputs[0].shape[numbers.lhs_spec[axis + 2]]
    window = op.inputs[1].shape[numbers.rhs_spec[axis + 2]]
    results = op.outputs[0].shape[numbers.out_spec[axis + 2]]
    stride, (low, _) = params["window_strides"][axis], params["padding"][axis]
    spread, dilation = params["lhs_dilation"][axis], params["rhs_dilation"][axis]
    positions = (i * stride - low + j * dilation for i in range(results) for j in range(window))
    return sum(0 <= p <= (size - 1) * spread and p % spread == 0 for p in positions)
