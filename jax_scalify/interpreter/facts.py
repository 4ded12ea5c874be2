"""The facts about an equation's results, given the facts about its operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import Interpretation, is_var
from jax_scalify.interpreter.operand import Bound, Facts, Operand, comparable_sizes, largest
from jax_scalify.interpreter.traits import Traits, traits_of
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import ONE, Scale

# A constant in a divisor is mostly a guard, as in `x / where(n == 0, 1, n)`. The elements that it
# divides are 0, or another `where` drops them. So a quotient by a constant counts as at most this
# times the scale of all quotients. In float16, this scale is then raised by at most 2**10, and the
# other elements keep their digits.
_LARGEST_QUOTIENT = Scale(22)
# A constant in a divisor that is smaller than this is an epsilon: 1e-3, 1e-12.
_LARGEST_EPSILON = -9
# For each operand, the sign of a constant beside it that makes the equation half of a clip.
_SIDES = {"max": (-1, -1), "min": (1, 1)}
_SIDES |= {"gt": (1, -1), "ge": (1, -1), "lt": (-1, 1), "le": (-1, 1)}
_PRODUCTS = ("mul", "div", "dot_general", "ragged_dot_general", "conv_general_dilated")


def facts_of(eqn: Any, inputs: Sequence[Value]) -> Facts:
    """Return what is known about the elements of an equation's results."""
    name, traits = eqn.primitive.name, traits_of(eqn.primitive.name)
    if traits.elements == "rescaled":  # other operands are scales
        inputs = inputs[:1]
    return Facts(
        is_nonnegative(eqn, inputs),
        _is_computed(eqn, inputs, traits),
        _is_peaked(eqn, inputs, traits),
        _count_sums(eqn, inputs, traits),
        _one_sided_bound(eqn, inputs, traits),
        _constant_among(eqn, inputs, traits),
        # A moved, cast or shifted gate is a gate too: in `1 - sigmoid(x)`, the only operand that is
        # not a constant is a gate.
        (traits.is_given or name in ("add", "sub"))
        and [v.facts.gate for v in inputs if v.constant is None] == [True],
    )


def is_nonnegative(eqn: Any, inputs: Sequence[Value]) -> bool:
    """Return whether no element of an equation's outputs can be negative.

    Integer results may be negative, because integer sums and products wrap around. Casts are the
    exception, unless they are to a smaller integer, which may wrap around too.
    """
    name, traits = eqn.primitive.name, traits_of(eqn.primitive.name)
    if name == "convert_element_type":
        before, after = inputs[0].dtype, eqn.outvars[0].aval.dtype
        are_integers = all(jnp.issubdtype(dtype, jnp.integer) for dtype in (before, after))
        wraps = are_integers and jnp.iinfo(after).max < jnp.iinfo(before).max
        return inputs[0].facts.nonneg and not wraps
    dtypes_of_results = (getattr(v.aval, "dtype", bool) for v in eqn.outvars)  # tokens have none
    if not any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes_of_results):
        return False
    if traits.elements == "rescaled":
        return inputs[0].facts.nonneg
    if traits.is_matmul:
        # One factor may be an integer array. A third operand may be the sizes of groups.
        numbers = inputs[:2]
    else:  # one of several results may be an integer operand, as in a barrier or `sort`
        numbers = inputs if len(eqn.outvars) > 1 else [v for v in inputs if v.is_scalable]
    signs = [v.facts.nonneg for v in numbers]
    if name == "max":
        # One non-negative operand is enough: `relu(x)` is `max(x, 0)`.
        return any(signs)
    if traits.nonnegative == "always" or _is_square(eqn, inputs):
        return True
    # `x.at[i].get(mode="fill", fill_value=-1)` gives -1 where `i` is out of bounds.
    if name == "gather" and (eqn.params["fill_value"] or 0) < 0:
        return False
    if name == "scatter" and eqn.params["update_jaxpr"] is not None:  # may apply any function
        return False
    return traits.keeps_nonnegative and bool(signs) and all(signs)


def _is_square(eqn: Any, inputs: Sequence[Value]) -> bool:
    """Return whether results are even powers, or products of multiples: `(0.001 * g) * g`."""
    if eqn.primitive.name != "mul":
        return eqn.primitive.name == "integer_pow" and eqn.params["y"] % 2 == 0
    lhs, rhs = inputs
    if eqn.invars[0] is eqn.invars[1]:
        return True
    if not isinstance(lhs, Operand) or not isinstance(rhs, Operand):
        return False
    return lhs.origin is rhs.origin and lhs.mantissa * rhs.mantissa > 0


def _is_computed(eqn: Any, inputs: Sequence[Value], traits: Traits) -> bool:
    """Return whether results are computed: not only arguments that were moved, cast or scaled."""
    arrays = [v for v in inputs if v.is_scalable and v.number is None]
    # The terms of a sum of `0.5 * w` are as independent as those of the argument `w`.
    if eqn.primitive.name in ("mul", "div") and len(arrays) == 1:
        return arrays[0].facts.computed
    return _repeats(eqn) or not traits.is_given or any(v.facts.computed for v in arrays)


def _repeats(eqn: Any) -> bool:
    """Return whether an equation repeats elements: the terms of their sum are not independent."""
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    return math.prod(eqn.invars[0].aval.shape) != eqn.outvars[0].aval.size


def _is_peaked(eqn: Any, inputs: Sequence[Value], traits: Traits) -> bool:
    """Return whether results are exponentials or cast masks in a narrow dtype, or multiples."""
    name = eqn.primitive.name
    mask = name == "convert_element_type" and inputs[0].dtype == np.bool_
    if mask or name in ("exp", "exp2"):
        return dtypes.is_narrow(eqn.outvars[0].aval.dtype)
    keeps = traits.is_given or traits.is_view or name in ("mul", "div", "select_n")
    return keeps and any(v.facts.peaked for v in inputs)


def _count_sums(eqn: Any, inputs: Sequence[Value], traits: Traits) -> int:
    """Count the added cotangents of a weight or bias that is used several times."""
    # If `w` is used in `x @ w` and in `y @ w`, its cotangent is the `add_any` of two matmuls, which
    # makes 2. A transpose keeps the count. `_growth` in `rules/aligning.py` reads it.
    counts = [v.facts.sums for v in inputs]
    if traits.elements == "summed":
        return 1
    if eqn.primitive.name == "add_any":
        return sum(counts) if all(counts) else 0
    return max(counts) if traits.is_given and not _repeats(eqn) else 0


def _one_sided_bound(eqn: Any, inputs: Sequence[Value], traits: Traits) -> Bound | None:
    """Return the bound of `max(x, c < 0)`, `min(x, c > 0)`, `x > c > 0` and `x < c < 0`.

    A cast of the array keeps its bound. A cast of the condition has no bound.
    """
    name, bound = eqn.primitive.name, inputs[0].facts.bound if len(inputs) == 1 else None
    if name in _SIDES:
        for x, c, side in zip(inputs, inputs[::-1], _SIDES[name], strict=True):
            if isinstance(x, Operand) and _is_bound(c, side):
                return Bound(float(c.constant), x)
        return None
    if bound is None or name != "convert_element_type":
        return bound if traits.elements in ("same", "rescaled") else None
    if not inputs[0].is_scalable:
        return None
    dtype = eqn.outvars[0].aval.dtype  # rounding keeps the order of numbers
    rounded = float(np.asarray(bound.number).astype(dtype)) if dtypes.is_scalable(dtype) else 0
    return Bound(rounded, bound.x) if rounded and math.isfinite(rounded) else None


def _constant_among(eqn: Any, inputs: Sequence[Value], traits: Traits) -> Scale | None:
    """Return the size of the largest constant among the elements: see `Facts.constant`."""
    if not any(dtypes.is_scalable(getattr(v.aval, "dtype", bool)) for v in eqn.outvars):
        return None
    name, floats = eqn.primitive.name, [v for v in inputs if v.is_scalable]
    known = [v.facts.constant for v in floats]
    constant = largest(known)
    # `jnp.where(m, x, 1)` and `x.at[i].set(1)` write the 1 among the elements of `x`.
    if traits.elements in ("joined", "placed"):
        # If the whole array is chosen at once, its scale is chosen with it.
        is_one = not eqn.outvars[0].aval.shape or (
            name == "select_n" and inputs[0].number is not None
        )
        # `min(x, 100)` writes 100 in the place of larger elements only, so it fits at their scale.
        sides = (-1, 0, 1) if name == "clamp" else _SIDES.get(name, (0,) * len(floats))
        written = [v for v, side in zip(floats, sides, strict=True) if not _is_bound(v, side)]
        return constant if is_one else largest([constant, *map(_size_of_constant, written)])
    if constant is None:
        return None
    if name in _PRODUCTS:
        if len(floats) != 2 or name == "div" and _is_epsilon(known[1]):
            return None
        # Elements of `3 * where(m, x, 1)` are 3. Multiplied by `y`, they are near `3 * y.scale`.
        left, right = map(_size_of_factor, floats)
        if left is None or right is None:
            return None
        size = left / right if name == "div" else left * right
        divisor = floats[1]
        if name == "div" and known[1] is not None and isinstance(divisor, Operand):
            most = left / divisor.scale.largest * _LARGEST_QUOTIENT
            size = algebra.meet(*comparable_sizes([size, most]))
        # The size of the constant 3 is 2**1.58. A size with atoms is a scale, of a whole exponent.
        return size if size.is_static else Scale(math.ceil(size.exponent), size.factors)
    if name == "reduce_sum":
        terms = math.prod(inputs[0].shape[a] for a in eqn.params["axes"])
        if not isinstance(terms, int):  # a symbolic size
            return None
        # All terms of a sum may be the constant: a row of `where(m, x, 1)` may have no `x`.
        return constant * Scale(math.ceil(math.log2(max(terms, 1))))
    if name in ("square", "integer_pow"):
        power = eqn.params.get("y", 2)
        return constant**power if power >= 0 else None
    # `jnp.where(m, x, 1) - y` has elements near 1 wherever the first term has.
    keeps = traits.is_given or traits.is_view or name in ("add", "add_any", "sub", "abs")
    return constant if keeps else None


def _is_epsilon(size: Scale | None) -> bool:
    """Return whether the constant among the elements of a divisor is an epsilon.

    In `x / max(norm, 1e-6)` the dividend is as small as the epsilon where it is chosen. If its
    quotient counted, the data of all unit vectors would be near 2**-10.
    """
    return size is not None and size.is_static and size.exponent < _LARGEST_EPSILON


def _is_bound(value: Value, side: int) -> bool:
    """Return whether a value is the bound of a clip, which replaces larger elements only."""
    return bool(side) and value.constant is not None and bool(side * value.constant > 0)


def _size_of_factor(value: Value) -> Scale | None:
    """Return the size of a constant, of the constant among elements, or their scalar scale."""
    if value.constant is not None:
        return _size_of_constant(value)
    constant = value.facts.constant
    if constant is not None or value.number is not None:
        # Larger constants are mask values, or are infinite without `scalify` too.
        is_mask = constant is not None and constant.exponent >= jnp.finfo(value.dtype).maxexp
        return None if is_mask else constant
    scale = value.scale if isinstance(value, Operand) else ONE
    return None if scale.ndim or scale.is_zero else scale


def _size_of_constant(value: Value) -> Scale | None:
    """Return the size of a constant; None for 0, nan, infinities and mask values like finfo.min."""
    number = value.constant
    if number is None or number.dtype.kind == "c" or not number:
        return None
    beyond = abs(float(number)) >= float(jnp.finfo(value.dtype).max)
    return None if beyond or np.isnan(number) else Scale(math.log2(abs(float(number))))


def nonnegative_results(jaxpr: Any, nonneg: Sequence[bool]) -> list[bool]:
    """Return which results of a jaxpr are non-negative, given which operands are non-negative."""

    def known_of(atom: Any, flag: bool) -> Value:
        aval: Any = atom.aval
        if not is_var(atom):
            return Plain.of(np.asarray(atom.val, aval.dtype))
        flag = flag or aval.dtype == np.bool_
        return Plain(shape=aval.shape, dtype=aval.dtype, facts=Facts(nonneg=flag))

    def equation(eqn: Any, flags: list[bool]) -> list[bool]:
        operands = [known_of(v, flag) for v, flag in zip(eqn.invars, flags, strict=True)]
        return [is_nonnegative(eqn, operands)] * len(eqn.outvars)

    interpretation = Interpretation(
        equation=equation,
        constant=lambda literal: known_of(literal, False).facts.nonneg,
        join=lambda a, b: a and b,
        unknown=False,
    )
    flags = interpretation.results(jaxpr, nonneg)
    return [known_of(v, flag).facts.nonneg for v, flag in zip(jaxpr.outvars, flags, strict=True)]
