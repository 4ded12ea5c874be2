"""What the interpreter knows about a value: plain or scaled, and facts found while tracing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from jax_scalify import _compat, dtypes
from jax_scalify.abstract import Interpretation
from jax_scalify.algebra import Scale
from jax_scalify.array import ScaledArray
from jax_scalify.deferred import split
from jax_scalify.traits import traits_of

# How NumPy computes what XLA would be asked to compile for two numbers.
_IN_NUMPY = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "square": np.square,
    "sqrt": np.sqrt,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "select_n": lambda which, *cases: cases[int(which)],
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of the elements of a value.

    Attributes:
        nonneg: none is negative.
        computed: they were made of other values, and not given to the function as they are: they
            may have something in common with those of other such values.
        peaked: they are exponentials, or a mask, in a dtype of short range: one of them may be as
            large as all others together, and the range does not hold both ends.
        sums: how many sums over other axes, as of a matmul, were added up to it; else 0.
        bound: none is below it if it is negative, and none above if it is positive: the result of
            the first half of `clip`; else None.
        constant: the exponent of the largest constant that was put among them, whose data may be
            nearly as large as the dtype's; else None.
    """

    nonneg: bool = False
    computed: bool = False
    peaked: bool = False
    sums: int = 0
    bound: float | None = None
    constant: int | None = None

    def join(self, other: Facts) -> Facts:
        """What is known of a value that may be either of two."""
        return Facts(
            self.nonneg and other.nonneg,
            self.computed or other.computed,
            self.peaked or other.peaked,
            self.sums if self.sums == other.sums else 0,
            self.bound if self.bound == other.bound else None,
            _largest([self.constant, other.constant]),
        )


def _largest(numbers: Iterable[int | None]) -> int | None:
    return max((n for n in numbers if n is not None), default=None)


NOTHING = Facts()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Value:
    """A variable's value and the facts about it.

    Attributes:
        shape, dtype: of the variable.
        array: a plain array or a `ScaledArray` (with a `Scale`); None for a uniform value of which
            no array has been made.
        uniform: the 0-d value that every element has: a NumPy scalar for a constant (of a wider
            dtype, if float16 does not hold what was computed), a traced 0-d array for a scalar
            that was broadcast (learning rate, loss / batch size).
        facts: about its elements.
        scale: for a plain 0-d value that *is* a scale, that scale.
        depth: number of alignments that XLA may fuse into one kernel with the value's computation.
        made_with: the sharding of a uniform value of which no array has been made, if it is
            explicit.
    """

    shape: tuple[int, ...]
    dtype: Any
    array: Any = None
    uniform: Any = None
    facts: Facts = NOTHING
    scale: Scale | None = None
    depth: int = 0
    made_with: Any = None

    @classmethod
    def of(
        cls,
        array: Any,
        *,
        facts: Facts = NOTHING,
        scale: Scale | None = None,
        depth: int = 0,
    ) -> Value:
        """Wrap a plain array, a NumPy or Python number, or a `ScaledArray`."""
        if isinstance(array, ScaledArray):
            return cls(
                shape=array.shape,
                dtype=array.dtype,
                array=array,
                facts=facts,
                depth=depth,
            )
        if not isinstance(array, (jax.Array, np.ndarray, np.generic)):
            array = np.asarray(array, dtypes.leaf_dtype(array))
        if isinstance(array, np.ndarray) and array.ndim == 0:
            array = array[()]
        return cls(
            shape=array.shape,
            dtype=array.dtype,
            array=array,
            uniform=array if array.ndim == 0 else None,
            facts=_with_constant(facts, array),
            scale=scale,
        )

    @classmethod
    def filled(
        cls,
        like: Any,
        uniform: Any,
        *,
        facts: Facts = NOTHING,
    ) -> Value:
        """A value whose elements are all equal; its array is made when somebody needs it.

        It has the shape, dtype and sharding of `like`: an abstract value, a `Value`, an array.
        """
        return cls(
            shape=tuple(like.shape),
            dtype=like.dtype,
            uniform=uniform,
            facts=_with_constant(facts, uniform),
            made_with=_compat.explicit_sharding(like),
        )

    @property
    def sharding(self) -> Any:
        """The sharding of its array, or of the one that would be made."""
        if self.array is None:
            return self.made_with
        data = split(self.array)[0] if self.is_scaled else self.array
        return getattr(jax.typeof(data), "sharding", None)

    @property
    def nonneg(self) -> bool:
        """Whether no element is negative."""
        return self.facts.nonneg

    @property
    def computed(self) -> bool:
        """Whether it was made of other values."""
        return self.facts.computed

    @property
    def peaked(self) -> bool:
        """Whether one element may be as large as all others together, in a short range."""
        return self.facts.peaked

    @property
    def is_scaled(self) -> bool:
        """Whether the value carries a scale."""
        return isinstance(self.array, ScaledArray)

    @property
    def is_scalable(self) -> bool:
        """Whether the value has a floating dtype."""
        return dtypes.is_scalable(self.dtype)

    @property
    def constant(self) -> Any:
        """The number that every element has, if it is known while tracing, else None."""
        return self.uniform if isinstance(self.uniform, np.generic) else None

    def plain(self) -> Any:
        """The value as a plain array; not for scaled values."""
        if self.array is not None:
            return self.array
        return filled(in_dtype(self.uniform, self.dtype), self)

    @property
    def is_beyond(self) -> bool:
        """Whether it is a constant that its dtype does not hold, but a scale does."""
        return self.constant is not None and self.uniform.dtype != self.dtype


def in_dtype(number: Any, dtype: Any) -> Any:
    """A uniform number in the dtype of its value: inf, if that does not hold it."""
    with np.errstate(over="ignore"):
        return number if number.dtype == dtype else number.astype(dtype)


def filled(data: Any, like: Any) -> Any:
    """Give the data of a constant or of a broadcast scalar its full shape, and sharding.

    They are those of `like`: an abstract value, a `Value`, an array.
    """
    shape, sharding = tuple(like.shape), _compat.explicit_sharding(like)
    if np.shape(data) == shape:
        return data
    if sharding is None:
        return jnp.broadcast_to(data, shape)
    dims = range(len(shape) - np.ndim(data), len(shape))
    return lax.broadcast_in_dim(jnp.asarray(data), shape, dims, out_sharding=sharding)


def _is_nonnegative_constant(array: Any) -> bool:
    if array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.unsignedinteger):
        return True
    real = jnp.issubdtype(array.dtype, np.floating) or jnp.issubdtype(array.dtype, np.integer)
    return isinstance(array, np.generic) and real and float(array) >= 0


def _with_constant(facts: Facts, array: Any) -> Facts:
    nonneg = facts.nonneg or _is_nonnegative_constant(array)
    return dataclasses.replace(facts, nonneg=nonneg)


def facts_of(eqn: Any, inputs: list[Value]) -> Facts:
    """What is known of the elements of an equation's results."""
    if traits_of(eqn.primitive.name).elements == "rescaled":  # other operands speak of the scale
        inputs = inputs[:1]
    return Facts(
        is_nonnegative(eqn, inputs),
        _is_computed(eqn, inputs),
        _is_peaked(eqn, inputs),
        _count_sums(eqn, inputs),
        _one_sided_bound(eqn, inputs),
        _constant_among(eqn, inputs),
    )


def is_nonnegative(eqn: Any, inputs: list[Value]) -> bool:
    """Tell whether no element of an equation's outputs can be negative.

    Of integers only casts are looked at: sums and products wrap around, and some casts do.
    """
    name, params = eqn.primitive.name, eqn.params
    traits = traits_of(name)
    if name == "convert_element_type":
        return inputs[0].nonneg and not _may_wrap(inputs[0].dtype, eqn.outvars[0].aval.dtype)
    if not any(jnp.issubdtype(_dtype(v), jnp.floating) for v in eqn.outvars):
        return False
    if traits.elements == "rescaled":
        return inputs[0].nonneg
    # Of several results, one may be an operand of integers: a barrier's, or sorted along.
    numbers = inputs if len(eqn.outvars) > 1 else [v for v in inputs if v.is_scalable]
    if traits.nonnegative == "always":
        return True
    if name == "integer_pow" and params["y"] % 2 == 0:
        return True
    if name == "mul" and eqn.invars[0] is eqn.invars[1]:
        return True
    if name == "max":
        return any(v.nonneg for v in numbers)
    if name == "gather" and (params["fill_value"] or 0) < 0:
        return False
    if name == "scatter" and params["update_jaxpr"] is not None:  # any function of the elements
        return False
    if traits.keeps_nonnegative or name == "integer_pow":
        return bool(numbers) and all(v.nonneg for v in numbers)
    return False


def _dtype(var: Any) -> Any:
    return getattr(var.aval, "dtype", np.dtype(bool))  # a reference or token has none


def _may_wrap(before: Any, after: Any) -> bool:
    """Tell whether a cast may make a negative number of one that is not: floats saturate."""
    if not jnp.issubdtype(before, jnp.integer) or not jnp.issubdtype(after, jnp.integer):
        return False
    return jnp.iinfo(after).max < jnp.iinfo(before).max


def _is_computed(eqn: Any, inputs: list[Value]) -> bool:
    """Tell whether an equation does more than to move, cast or scale what was given."""
    name = eqn.primitive.name
    arrays = [v for v in inputs if v.is_scalable and v.uniform is None]
    if name in ("mul", "div") and len(arrays) == 1:
        return arrays[0].computed
    return _repeats(eqn) or not traits_of(name).is_given or any(v.computed for v in arrays)


def _repeats(eqn: Any) -> bool:
    """Tell whether an equation repeats elements: sums of them are no sums of independent ones."""
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    return math.prod(eqn.invars[0].aval.shape) != eqn.outvars[0].aval.size


def _is_peaked(eqn: Any, inputs: list[Value]) -> bool:
    """Tell whether an equation takes exponentials or masks in float16, or moves or scales them."""
    name = eqn.primitive.name
    mask = name == "convert_element_type" and inputs[0].dtype == np.bool_
    if mask or name in ("exp", "exp2"):
        return dtypes.has_short_range(eqn.outvars[0].aval.dtype)
    traits = traits_of(name)
    keeps = traits.is_given or traits.is_view or name in ("mul", "div", "select_n")
    return keeps and any(v.peaked for v in inputs)


def _count_sums(eqn: Any, inputs: list[Value]) -> int:
    """Count the cotangents that add up to that of a weight or bias which is used repeatedly."""
    traits, counts = traits_of(eqn.primitive.name), [v.facts.sums for v in inputs]
    if traits.elements == "summed":
        return 1
    if eqn.primitive.name == "add_any":
        return sum(counts) if all(counts) else 0
    return max(counts) if traits.is_given and not _repeats(eqn) else 0


def _one_sided_bound(eqn: Any, inputs: list[Value]) -> float | None:
    """The negative constant of a maximum, or the positive one of a minimum."""
    name = eqn.primitive.name
    if name not in ("max", "min"):
        keeps = traits_of(name).elements in ("same", "cast", "rescaled") and len(inputs) == 1
        return inputs[0].facts.bound if keeps else None
    numbers = [float(v.constant) for v in inputs if v.is_scalable and v.constant is not None]
    beyond_zero = [n for n in numbers if (n < 0 if name == "max" else n > 0)]
    return beyond_zero[0] if beyond_zero else None


def _constant_among(eqn: Any, inputs: list[Value]) -> int | None:
    """The exponent of the largest constant among elements that have another scale."""
    name, traits = eqn.primitive.name, traits_of(eqn.primitive.name)
    floats = [v for v in inputs if v.is_scalable]
    known = [v.facts.constant for v in floats]
    if not floats or not any(dtypes.is_scalable(_dtype(v)) for v in eqn.outvars):
        return None
    if traits.elements in ("joined", "placed"):
        return _largest([*known, *map(_exponent_of_constant, floats)])
    if name in ("mul", "div", "dot_general", "ragged_dot_general", "conv_general_dilated"):
        sign = -1 if name == "div" else 1
        factors = [
            n if v.constant is None else _exponent_of_constant(v) for v, n in zip(floats, known)
        ]
        left, right = factors if len(factors) == 2 else (None, None)
        return None if left is None or right is None else left + sign * right
    if name in ("square", "integer_pow"):
        power = eqn.params.get("y", 2)
        return None if known[0] is None or power < 0 else power * known[0]
    if name == "reduce_sum":
        terms = math.prod(inputs[0].shape[a] for a in eqn.params["axes"])
        if known[0] is None or not isinstance(terms, int):  # of a symbolic shape
            return None
        return known[0] + max(terms, 1).bit_length() - 1
    keeps = traits.is_given or traits.is_view or name in ("add", "add_any", "sub", "abs")
    return _largest(known) if keeps else None


def _exponent_of_constant(value: Value) -> int | None:
    """The exponent of a constant; None of 0, what is not finite, and masks."""
    number = value.constant
    if number is None or number.dtype.kind == "c" or not number:
        return None
    beyond = abs(float(number)) >= float(jnp.finfo(value.dtype).max)
    return None if beyond or np.isnan(number) else math.frexp(float(number))[1] - 1


def nonnegative_results(jaxpr: Any, nonneg: Sequence[bool]) -> list[bool]:
    """Tell for each result of a jaxpr whether it cannot be negative, given this of its operands."""

    def value_of(atom: Any, flag: bool) -> Value:
        aval: Any = atom.aval
        if isinstance(atom, jex_core.Literal):
            return Value.of(np.asarray(atom.val, aval.dtype))
        flag = flag or aval.dtype == np.bool_
        return Value(shape=aval.shape, dtype=aval.dtype, facts=Facts(nonneg=flag))

    def equation(eqn: Any, flags: list[bool]) -> list[bool]:
        operands = [value_of(v, flag) for v, flag in zip(eqn.invars, flags, strict=True)]
        return [is_nonnegative(eqn, operands)] * len(eqn.outvars)

    interpretation = Interpretation(
        equation=equation,
        constant=lambda literal: value_of(literal, False).nonneg,
        join=lambda a, b: a and b,
        unknown=False,
    )
    flags = interpretation.results(jaxpr, nonneg)
    return [value_of(v, flag).nonneg for v, flag in zip(jaxpr.outvars, flags, strict=True)]


def fold_constants(eqn: Any, constants: list[Any]) -> Any:
    """Evaluate an equation of NumPy scalars in NumPy; None if only XLA can.

    What float16 does not hold, as `2**24` or `2**-20`, is a number of float32.
    """
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    kinds = {np.dtype(c.dtype).kind for c in constants}
    if dtype == np.float16 or any(c.dtype != v.aval.dtype for c, v in zip(constants, eqn.invars)):
        constants = [np.float64(c) if c.dtype.kind == "f" else c for c in constants]
    with np.errstate(all="ignore"):
        if name == "convert_element_type":
            if not kinds <= set("biuf") or np.dtype(dtype).kind != "f":
                return None
            narrows = dtype == np.float16
            return _held(np.float64(constants[0]), dtype) if narrows else constants[0].astype(dtype)
        if name not in _IN_NUMPY or (name == "div" and kinds != {"f"}):
            return None
        return _held(_IN_NUMPY[name](*constants), dtype)


def _held(number: Any, dtype: Any) -> Any:
    """A number in a dtype, or in float32; None if it is of another kind."""
    if number.dtype == dtype:
        return number
    if number.dtype.kind != np.dtype(dtype).kind:
        return None
    size, finfo = abs(np.float64(number)), np.finfo(dtype)
    holds = size == 0 or not size < finfo.tiny and (not size > finfo.max or np.isinf(size))
    return number.astype(dtype if holds else np.float32)
