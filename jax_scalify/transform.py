"""The transform `scalify`: trace a function once, then interpret its jaxpr on scaled values."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jax_scalify import _compat
from jax_scalify import rules as _rules  # noqa: F401  (registers every rule)
from jax_scalify.arrays.scaled_array import ScaledArray, align_scale, check_scaled, is_scaled
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import all_equations, replaced
from jax_scalify.config import ScalifyConfig, current_config
from jax_scalify.interpreter import observing
from jax_scalify.interpreter.constants import promote
from jax_scalify.interpreter.corrections import Calibrated
from jax_scalify.interpreter.derivatives import constant_scales, with_user_derivatives
from jax_scalify.interpreter.evaluation import evaluate
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.rescaling import at_home, at_scale, within_range
from jax_scalify.interpreter.tracing import argument_name, trace
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.passes.averages import report_lost_averages
from jax_scalify.passes.pruning import pruned
from jax_scalify.passes.setup import SetupWarning, nothing_scaled, wide_matmuls
from jax_scalify.primitives import definitions as primitives
from jax_scalify.scales.algebra import GIVEN_EXTENT, NARROW_EXTENT, Scale
from jax_scalify.scales.table import ScaleTable


def scalify(
    fun: Callable,
    *,
    config: ScalifyConfig | None = None,
    calibration: Calibrated | None = None,
) -> Callable:
    """Transform a function so that each floating-point value is computed as `data * scale`.

    The forward pass, the derivatives and the optimizer inside `fun` are transformed together, with
    one rule for each primitive. Write `fun` for plain arrays. `scalify` is a pure transform, like
    `jax.grad`. Use it under `jax.jit`.

    Args:
        fun: a traceable function of pytrees. `ScaledArray` leaves are scaled, other arrays are
            plain, and strings, callables, Python numbers and `None` are static. `fun` may write to
            Flax NNX modules, optimizers and random streams: the caller's objects change, as under
            `nnx.jit`. Put `nnx.jit` around `scalify`, not inside `fun`.
        config: the options; by default, the options of the enclosing `with ScalifyConfig(...)`.
        calibration: the result of `jsa.calibrate` for `fun`. Where data would leave its band, a
            static power of two moves between data and scale. A state with dynamic scales is brought
            to the scales that `calibration.freeze` would give it.

    Returns:
        A function of the same arguments. A floating-point result that depends on a scaled value or
        on a constant is a `ScaledArray`. Its scale is dynamic if any scaled argument has a dynamic
        scale, unless the result replaces a leaf with a static scale: see `freeze_scales`. With
        plain arguments only (and no `set_scaling` inside), it computes exactly what `fun` computes.
        Results have the dtypes and weak types that `fun` gives them. As under `jax.jit`, each has
        its own buffer. Strings, callables and Python ints among the results are unchanged, and
        so are floats that are arguments, as in an Equinox model.

    Raises:
        TypeError: if `fun` is not callable, `config` is not a `ScalifyConfig` or `calibration` is
            not a `Calibration`. When called, if a `ScaledArray` holds integers or lists, or has a
            scale that is packed for storage.
        ValueError: when called, if a scale does not fit its data or is not a power of two (dynamic
            scales are not checked under `jit`), if `fun` changes the structure of an NNX object, or
            if the calibration was made for another function.
        MissingRuleError: when called, if a primitive has no rule and `missing_rule` is "error".

    Source: Balanca et al., "Scalify: scale propagation for efficient low-precision LLM training",
    2024, section 3.

    Example:
        >>> @jax.jit
        ... @jsa.scalify
        ... def f(x, w):
        ...     return jax.nn.relu(x @ w)
        >>> x = jsa.scaled_array(jnp.ones((4, 4), jnp.float16), 2.0**10)
        >>> y = f(x, x)  # 2**22: far outside float16
        >>> print(jsa.asarray(y, jnp.float32)[0, 0])
        4.194304e+06
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be callable, got {type(fun).__name__}.")
    if config is not None and not isinstance(config, ScalifyConfig):
        raise TypeError(f"`config` must be a ScalifyConfig, got {type(config).__name__}.")
    if calibration is not None and not callable(getattr(calibration, "corrections", None)):
        raise TypeError(
            f"`calibration` must be a `jsa.Calibration`, got {type(calibration).__name__}: "
            "`jsa.calibrate` and `jsa.Calibration.load` return one."
        )

    name = getattr(fun, "__name__", type(fun).__name__)
    warned: set[Any] = set()

    def warn_once(find: Callable[..., str | None], *found: Any) -> None:
        message = None if find in warned or _is_inside.get() else find(name, *found)
        if message is not None:
            warned.add(find)
            warnings.warn(message, SetupWarning, stacklevel=3)

    @functools.wraps(fun)
    def scalified(*args: Any, **kwargs: Any) -> Any:
        active = config or current_config()
        check_scaled(args, "args")
        check_scaled(kwargs, "kwargs")
        if calibration is not None and kwargs:
            args, kwargs = _by_position(fun, args, kwargs)
        token = _is_inside.set(True)
        try:
            traced = trace(fun, args, kwargs, takes_blocks=True)
        finally:
            _is_inside.reset(token)
        closed, operands = traced.closed, traced.operands
        names = list(map(argument_name, traced.paths))
        used = {eqn.primitive for eqn in all_equations(closed.jaxpr)}
        if not any(map(is_scaled, operands)) and primitives.set_scaling_p not in used:
            warn_once(nothing_scaled, operands, names)
            out = jex_core.jaxpr_as_fun(closed)(*operands)
        else:
            report_lost_averages(closed.jaxpr)
            warn_once(wide_matmuls, closed.jaxpr, operands, names)

            def call(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
                # Jaxprs that are made for derivatives are not calibrated.
                own = calibration if jaxpr.jaxpr.eqns is closed.jaxpr.eqns else None
                return _scale_call(jaxpr, operands, active, own, names)

            out = with_user_derivatives(call, closed, _with_constant_scales(operands))
        out = [_typed(x, aval) for x, aval in zip(out, closed.out_avals, strict=True)]
        if not _compat.is_staging():
            out = _own_buffers(out, (operands, closed.consts))
        return traced.unflatten(out)

    return scalified


# True while `scalify` traces a function. A `scalify` inside it gets plain arrays and must not warn.
_is_inside: ContextVar[bool] = ContextVar("is_inside", default=False)


def _by_position(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    """Turn keyword arguments into positional ones: a calibration names arguments by position."""
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):  # there is no signature, or the call itself will raise
        return args, kwargs
    return bound.args, bound.kwargs


def _scale_call(
    closed: Any,
    operands: Sequence[Any],
    config: ScalifyConfig,
    calibration: Calibrated | None,
    names: list[str],
) -> list[Any]:
    """Interpret a closed jaxpr on `ScaledArray` and plain operands.

    With a calibration, dynamic scalar scales of operands are replaced by their calibrated scales.
    Results are operands of the next call, which must not compile again. So a result keeps a static
    scale only if all operands have static scales, or if it replaces a leaf with this scale: see
    `interpreter/homes.py`. All other scales become dynamic.
    """
    closed = pruned(closed)
    corrections, calibrated = None, [None] * len(operands)
    if calibration is not None:
        corrections = calibration.corrections(closed, names)
        calibrated = [calibration.scale_of(name) for name in names]
    hook = observing.hook_of(corrections)
    all_static = not any(is_scaled(x) and not x.is_static for x in operands)

    def interpret(table: ScaleTable, operands: Sequence[Any]) -> list[Any]:
        inputs = [_enter(x, table, k) for x, k in zip(operands, calibrated, strict=True)]
        outputs = evaluate(closed, inputs, table, config, hook)
        return [_leave(value, table, all_static) for value in outputs]

    narrow = _is_narrow(closed.jaxpr)
    # A traced scalar, such as a learning rate, is split into data and scale. The exception is a
    # step with wide dtypes and static scales that uses `match_scales`: its state is returned at the
    # given scales, so no result needs the scale of the scalar.
    used = {eqn.primitive for eqn in all_equations(closed.jaxpr)}
    keeps_scales = all_static and not narrow and primitives.match_scale_p in used
    table = ScaleTable(config.scale_dtype, splits_scalars=not keeps_scales, narrow=narrow)
    if not _compat.is_staging():
        return interpret(table, operands)
    return _staged(interpret, operands, table)


def _staged(
    interpret: Callable[..., list[Any]], operands: Sequence[Any], table: ScaleTable
) -> list[Any]:
    """Under `jit`, interpret in a new trace, so that all its scales are computed together."""
    leaves, tree = jax.tree.flatten(list(operands))
    # NumPy arrays and numbers stay constants of the new trace. Static scales are in the tree.
    variable = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    out_tree = None

    def flat(table: ScaleTable, *arrays: Any) -> list[Any]:
        nonlocal out_tree
        operands = jax.tree.unflatten(tree, replaced(leaves, variable, arrays))
        out, out_tree = jax.tree.flatten(interpret(table, operands))
        return out

    arrays = [leaves[i] for i in variable]
    scaled = table.trace(flat, arrays)
    if observing.is_observing.value:
        out = observing.as_call(jex_core.jaxpr_as_fun(scaled))(*arrays)
    else:
        out = _compat.inlined(scaled, arrays)
    return jax.tree.unflatten(out_tree, out)


def _is_narrow(jaxpr: Any) -> bool:
    """Return whether any value of a jaxpr is float16 or FP8."""
    equations = all_equations(jaxpr)
    variables = itertools.chain(jaxpr.invars, *(eqn.outvars for eqn in equations))
    found = {getattr(v.aval, "dtype", np.int32) for v in variables}
    return any(map(dtypes.is_narrow, found))


def _with_constant_scales(operands: Sequence[Any]) -> list[Any]:
    """Return the operands. Differentiation with respect to their dynamic scales raises."""
    dynamic = [i for i, x in enumerate(operands) if is_scaled(x) and not x.is_static]
    out = list(operands)
    if dynamic:
        scales = constant_scales([operands[i].scale for i in dynamic])
        for i, scale in zip(dynamic, scales, strict=True):
            out[i] = ScaledArray(operands[i].data, scale)
    return out


def _typed(x: Any, aval: Any) -> Any:
    """Return a result as a JAX array with the weak type of the plain function's result."""
    if is_scaled(x):
        return ScaledArray(_typed(x.data, aval), x.scale)
    x = x if isinstance(x, jax.Array) else jnp.array(x, aval.dtype)
    return _compat.weakly_typed(x) if aval.weak_type and not x.weak_type else x


def _own_buffers(outputs: list[Any], given: Any) -> list[Any]:
    """Copy results that share a buffer, as `jax.jit` does: a shared buffer cannot be donated."""
    seen = {id(leaf) for leaf in jax.tree.leaves(given)}

    def owned(x: Any) -> Any:
        if isinstance(x, jax.Array) and not _compat.is_traced(x):
            x = jnp.array(x) if id(x) in seen else x
            seen.add(id(x))
        return x

    return jax.tree.map(owned, outputs)


def _enter(operand: Any, table: ScaleTable, calibrated: int | None) -> Value:
    """Return an argument as a value. `calibrated` is the exponent of its calibrated scale."""
    if not is_scaled(operand):
        return Plain.of(operand)
    short = dtypes.is_narrow(operand.dtype)
    scale = (
        Scale.of(operand.scale)
        if operand.is_static
        else table.atom(
            align_scale(operand.scale, operand.ndim).astype(table.dtype),
            extent=NARROW_EXTENT if short else GIVEN_EXTENT,
        )
    )
    # `jnp.array` copies: `jnp.asarray` may alias the memory of a NumPy array that the user changes.
    data = operand.data if isinstance(operand.data, jax.Array) else jnp.array(operand.data)
    if calibrated is not None and not scale.is_static and not scale.ndim:
        return at_scale(Operand(data, scale), Scale(calibrated))
    if not data.ndim and dtypes.is_wide(data.dtype) and not scale.is_static:
        # A 0-d leaf of the state, such as a learning rate, has its own exponent as its scale.
        return Operand(data, scale * table.split(data)[1], unit=scale)
    # See `interpreter/homes.py`. A static 0 is no home, and neither is a dynamic scale in FP8.
    is_free = scale.is_zero if scale.is_static else dtypes.is_fp8(data.dtype)
    return Operand(data, scale, home=None if is_free else scale)


def _leave(value: Value, table: ScaleTable, keep_static: bool) -> Any:
    if not value.is_scalable or not (value.is_scaled or value.constant is not None):
        # A step counter stays plain, and so does a plain argument that is returned unchanged.
        return value.whole()
    x = within_range(at_home(promote(value, table, full=True)))
    if x.scale.is_static and (keep_static or x.scale == x.home):
        return ScaledArray(x.data, x.scale.value)
    return ScaledArray(x.data, table.output(x.scale))
