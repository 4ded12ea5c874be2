"""The transform, and the parameters that it wants."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import is_scaled
from jax_scalify.base import dtypes
from jax_scalify.interpreter.tracing import Traced, trace
from jax_scalify.unit_scaling.automatic.balancing import make_balanced_plan, measure_example
from jax_scalify.unit_scaling.automatic.evaluation import run
from jax_scalify.unit_scaling.automatic.explanation import Explanation, explain, rows_of
from jax_scalify.unit_scaling.automatic.observing import Measurement, describe, measure_sizes
from jax_scalify.unit_scaling.automatic.planning import Plan, make_plan
from jax_scalify.unit_scaling.automatic.program import flatten
from jax_scalify.unit_scaling.constraints import Constraint, apply_constraint


class UnitScaled:
    """What `unit_scale` returns: a function like the one it was given."""

    def __init__(
        self, fun: Callable, constraint: Constraint, example: tuple[Any, ...] | None = None
    ):
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._constraint = constraint
        self._sizes: list[float] | None = None
        if example is not None:
            if not isinstance(example, tuple):
                raise TypeError(
                    "The `example` of `unit_scale` must be a tuple of the arguments, got "
                    f"{type(example).__name__}."
                )
            traced = self._trace(example, {})
            if any(map(_compat.is_traced, traced.operands)):
                raise TypeError("The `example` of `unit_scale` must be arrays, not traced values.")
            self._sizes = measure_example(flatten(traced.closed), traced.operands)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the unit-scaled function."""
        traced, plan = self._plan(args, kwargs)
        return traced.unflatten(run(plan, traced.operands))

    def report(self, *args: Any, **kwargs: Any) -> Explanation:
        """Return what has been done to the function, for arguments of these shapes and dtypes."""
        traced, plan = self._plan(args, kwargs)
        named = zip(plan.scope.inputs, traced.paths, strict=True)
        return explain(plan, {value: _name(path) for value, path in named})

    def measure(self, *args: Any, **kwargs: Any) -> Measurement:
        """Return the RMS of every activation and gradient, for these arguments.

        The function is run once, in both passes; inside of branches, of loops of unknown length and
        of `shard_map` nothing is seen. Tensors of fewer than 16 elements are left out.
        """
        traced, plan = self._plan(args, kwargs)
        named = dict(zip(plan.scope.inputs, map(_name, traced.paths), strict=True))
        return describe(measure_sizes(plan, traced.operands), rows_of(plan), named)

    def _trace(self, args: Any, kwargs: Any) -> Traced:
        traced = trace(self._fun, args, kwargs)
        if any(map(is_scaled, traced.operands)):
            raise TypeError(
                "A function of `unit_scale` takes plain arrays, got a ScaledArray: apply "
                "`jsa.scalify` outside, `jsa.scalify(us.unit_scale(fun))`."
            )
        return traced

    def _plan(self, args: Any, kwargs: Any) -> tuple[Traced, Plan]:
        traced = self._trace(args, kwargs)
        scope = flatten(traced.closed)
        if self._sizes is not None:
            return traced, make_balanced_plan(scope, self._sizes)
        return traced, make_plan(scope, self._constraint)


def unit_scale(
    fun: Callable,
    *,
    constraint: Constraint = "to_output_scale",
    example: tuple[Any, ...] | None = None,
) -> UnitScaled:
    """Give the operations of an ordinary model unit scale, in both passes.

    The function is traced, and its jaxpr is evaluated with factors:

    - Products, convolutions and look-ups by 1/√(number of terms): of the result, and of each
      operand's gradient.
    - Everything between them, as far as nothing but its last result is used elsewhere, as one
      operation: a normalisation, a softmax, an activation. Its factors are measured while the
      model is traced, on unit Gaussians of a fixed seed; parameters that are repeated are taken
      for biases of zeros and gains of ones.
    - A sum of independent values becomes a weighted one, in which all terms have the same share
      of the variance: after `l` branches a residual sum is `√(l/(l+1)) skip + √(1/(l+1)) branch`,
      and the gradient of the branch is multiplied where the branch starts.

    An operand whose edge is a cut-edge of the graph, as that of a parameter that is used once,
    has a factor of its own; all others have that of the result. The gradient of each parameter is
    then that of the unit-scaled function up to one positive constant, which Adam does not see.

    If the first scalar among the results is floating, it is the loss: what follows the last
    product is not scaled in the forward pass, and one factor at its end gives the gradients their
    scale. Other results are auxiliary then. Of a function without a scalar all results count.

    These factors are those of independent unit Gaussians: where a model makes its tensors alike, as
    attention does with tokens and a mean with pixels, gradients are smaller or larger. With an
    `example` the function is run once in both passes, and the gradient of each value has a constant
    of its own, the inverse of its size there: no edge is constrained, and all gradients are near 1.

    Loops, the branches of `cond`, `jax.checkpoint` and `shard_map` are gone into. The condition of
    a loop sees what its body makes. A `psum` of products over n devices is a sum of n terms; one of
    statistics, as in a norm over devices, is a part of its function. What cannot be run by itself
    stays as it is, with a warning, and what is to stay as it is can be a `custom_vjp`, whose rules
    are kept.

    Use it with `unit_parameters`, under `jax.jit` (each call traces `fun`), and with learning
    rates of unit-scaled models. `jax.grad` and `jax.vmap` work.

    Args:
        fun: a traceable function of any pytrees.
        constraint: on the factors of an operation's result and of the operands that are at no
            cut-edge: the name of one in `us.constraints`, a function, or None, which makes
            gradients wrong.
        example: arguments as a tuple, such as `(params, batch)`, at initialisation; `constraint`
            has no say then. Calls may have other shapes, but the same operations.

    Returns:
        A function of the same arguments. Its `.report(*args)` says what was done, its
        `.measure(*args)` what size every tensor has.

    Raises:
        TypeError: if `fun` is not callable, or `example` is no tuple or traced; when called, for a
            `ScaledArray`.
        ValueError: if the constraint is not known; when called, if it does not fit an operation, or
            the function has other operations than on its example.

    Source: Blake et al., *Unit Scaling* (2023), section 5 and theorem 5.2; weights of residual
    sums, *u-µP* (2024), appendix F.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> @us.unit_scale
        ... def model(w, x):
        ...     return jnp.tanh(x @ w)
        >>> w, x = jnp.ones((16, 4)), jnp.ones((8, 16))
        >>> print(model.report(w, x).rows[0].alpha)
        0.25
        >>> x = jax.random.normal(jax.random.key(0), (64, 16))
        >>> model.measure(jax.random.normal(jax.random.key(1), (16, 4)), x).share_within()
        1.0
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be callable, got {type(fun).__name__}.")
    if not callable(constraint):  # of functions it is not known how many operands they take
        count = 1 if constraint == "to_grad_input_scale" else 2
        apply_constraint(constraint, 1.0, *[1.0] * count)
    return UnitScaled(fun, constraint, example)


def unit_parameters(params: Any) -> Any:
    """Divide every parameter by its RMS, unless all of its elements are the same.

    Biases of zeros and gains of ones stay as they are, and so do integers, booleans and keys.
    `unit_scale` does what the scale of an ordinary initialisation is for.

    Args:
        params: any pytree.

    Returns:
        The same pytree; dtypes and shapes are kept, and the RMS is taken in float32 at least.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.unit_parameters({"w": jnp.array([3.0, -3.0]), "b": jnp.zeros(2)})
        {'b': Array([0., 0.], dtype=float32), 'w': Array([ 1., -1.], dtype=float32)}
    """
    return jax.tree.map(_unit, params)


def _unit(leaf: Any) -> Any:
    if not (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)) or not leaf.size:
        return leaf
    wide = dtypes.promoted(leaf.dtype, jnp.float32)
    values = jnp.asarray(leaf, wide)
    is_constant = jnp.all(values == values.ravel()[0])
    rms = jnp.sqrt(jnp.mean(jnp.abs(values) ** 2))
    return jnp.where(is_constant, values, values / jnp.where(rms > 0, rms, 1)).astype(leaf.dtype)


def _name(path: Any) -> str:
    """The key path of an argument as code: `args[0]['w']`."""
    return ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
