"""The transform: trace a function once, then interpret its jaxpr on scaled values."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jax_scalify import _compat, algebra, chains, dtypes, observing, pow2, primitives, scale_table
from jax_scalify import rules as _rules  # noqa: F401  (registers every rule)
from jax_scalify.algebra import Scale
from jax_scalify.array import (
    ScaledArray,
    align_scale,
    check_scaled,
    is_scaled,
    may_be_powers_of_two,
)
from jax_scalify.config import ScalifyConfig, current_config
from jax_scalify.deferred import is_given_deferred, settled, with_scale
from jax_scalify.derivatives import constant_scales, with_user_derivatives
from jax_scalify.jaxprs import all_equations, makers, sub_jaxprs
from jax_scalify.multiplying import at_one_choice, in_reach, within_range
from jax_scalify.registry import (
    RuleContext,
    describe,
    find_rule,
    reason_to_dequantise,
    report_dequantised,
    report_missing,
)
from jax_scalify.rules.common import constant_scale, promote
from jax_scalify.rules.mixed import dequantising_rule
from jax_scalify.scale_table import ScaleTable
from jax_scalify.tracing import trace
from jax_scalify.traits import traits_of
from jax_scalify.values import (
    Facts,
    Value,
    facts_of,
    filled,
    fold_constants,
    in_dtype,
)

# A captured constant as large as this is a mask (-1e4, -1e9, finfo.min) and not an ordinary value.
_MASK = 9_999.0


def scalify(fun: Callable, *, config: ScalifyConfig | None = None) -> Callable:
    """Transform a function so that every floating-point value flows as `data * scale`.

    Forward pass, derivatives and optimizer inside `fun` are rewritten in one go, by one rule a
    primitive; `fun` itself is written for plain arrays. A pure transform, as `jax.grad` is: use it
    under `jax.jit`.

    Args:
        fun: a traceable function. Its arguments may be any pytrees; `ScaledArray` leaves are
            scaled, other arrays plain, and strings, callables, Python bools and ints and `None`
            static. What it writes into Flax NNX modules, optimizers and streams of random numbers
            comes back, as under `nnx.jit`, which goes around.
        config: options; by default those of the enclosing `with ScalifyConfig(...)`.

    Returns:
        A function of the same arguments. An output that depends on a scaled value is a
        `ScaledArray`, of a dynamic scale if any scaled argument had one. With plain arguments
        only (and no `set_scaling` inside) it computes exactly what `fun` does. Results have the
        dtypes and weak types of those of `fun`, and buffers of their own, as under `jax.jit`.
        Strings, callables and Python ints among them, as an Equinox model has, stay as they are.

    Raises:
        TypeError: if `fun` is not callable or `config` not a `ScalifyConfig`; when called, for a
            `ScaledArray` of integers or lists, or whose scale is packed for storage.
        ValueError: when called, for a scale that does not fit its data or is no power of two
            (which cannot be seen of a dynamic one under `jit`); if `fun` changes the structure of
            an NNX object.
        MissingRuleError: when called, for a primitive without a rule, if so configured.

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

    @functools.wraps(fun)
    def scalified(*args: Any, **kwargs: Any) -> Any:
        active = config or current_config()
        check_scaled(args, "args")
        check_scaled(kwargs, "kwargs")
        traced = trace(fun, args, kwargs)
        closed, operands = traced.closed, traced.operands
        used = {eqn.primitive for eqn in all_equations(closed.jaxpr)}
        if not any(map(is_scaled, operands)) and primitives.set_scaling_p not in used:
            out = jex_core.jaxpr_as_fun(closed)(*operands)
        else:
            call = functools.partial(_scale_call, config=active)
            out = with_user_derivatives(call, closed, _with_constant_scales(operands))
        out = [_typed(x, aval) for x, aval in zip(out, closed.out_avals, strict=True)]
        if not _compat.is_staging():
            out = _own_buffers(out, (operands, closed.consts))
        return traced.unflatten(out)

    return scalified


def _scale_call(closed: Any, operands: Sequence[Any], config: ScalifyConfig) -> list[Any]:
    """Interpret a closed jaxpr on `ScaledArray` and plain operands."""
    keep_static = not any(is_scaled(x) and not x.is_static for x in operands)
    found = [e.outvars[0] for e in closed.jaxpr.eqns if e.primitive is primitives.match_scale_p]
    matched = [any(var is other for other in found) for var in closed.jaxpr.outvars]

    def interpret(table: ScaleTable, operands: Sequence[Any]) -> list[Any]:
        inputs = [_enter(x, table) for x in operands]
        outputs = evaluate(closed, inputs, table, config)
        return [
            _leave(value, table, keep_static or is_matched)
            for value, is_matched in zip(outputs, matched, strict=True)
        ]

    narrow = _is_narrow(closed.jaxpr)
    keeps_scales = keep_static and not narrow and _gives_state_back(closed.jaxpr)
    options: dict[str, Any] = dict(splits_scalars=not keeps_scales, narrow=narrow)
    if not _compat.is_staging():
        table = ScaleTable(config.scale_dtype, **options)
        return interpret(table, operands)

    leaves, tree = jax.tree.flatten(list(operands))
    variable = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    out_tree = None
    float0s: dict[int, Any] = {}  # shapes of the tangents of integers, which no jaxpr computes

    def flat(table: ScaleTable, *arrays: Any) -> list[Any]:
        nonlocal out_tree
        full = list(leaves)
        for i, array in zip(variable, arrays, strict=True):
            full[i] = array
        out, out_tree = jax.tree.flatten(interpret(table, jax.tree.unflatten(tree, full)))
        float0s.update((i, x.shape) for i, x in enumerate(out) if x.dtype == jax.dtypes.float0)
        return [x for i, x in enumerate(out) if i not in float0s]

    arrays = [leaves[i] for i in variable]
    scaled = scale_table.trace(flat, arrays, config.scale_dtype, **options)
    call = jex_core.jaxpr_as_fun(scaled)
    call = observing.as_call(call) if observing.is_observing() else call
    rest = iter(call(*arrays))
    count = len(scaled.out_avals) + len(float0s)
    out = [
        np.zeros(float0s[i], jax.dtypes.float0) if i in float0s else next(rest)
        for i in range(count)
    ]
    return jax.tree.unflatten(out_tree, out)


def _is_narrow(jaxpr: Any) -> bool:
    """Tell whether a value has a dtype of the range of float16 or less."""
    equations = all_equations(jaxpr)
    variables = itertools.chain(jaxpr.invars, *(eqn.outvars for eqn in equations))
    found = {getattr(v.aval, "dtype", np.int32) for v in variables}
    return any(map(dtypes.has_short_range, found))


def _gives_state_back(jaxpr: Any) -> bool:
    """Tell whether a step gives its state back at the scales that it got.

    The exponent of a traced scalar is its scale for the sake of results and of narrow data. Where
    the scales of results are given, and everything has the range of float32, it need not be.
    """
    return any(eqn.primitive is primitives.match_scale_p for eqn in all_equations(jaxpr))


def _with_constant_scales(operands: Sequence[Any]) -> list[Any]:
    """The operands, of dynamic scales that cannot be differentiated by."""
    dynamic = [x.scale for x in operands if is_scaled(x) and not x.is_static]
    scales = iter(constant_scales(dynamic) if dynamic else ())
    return [
        ScaledArray(x.data, next(scales)) if is_scaled(x) and not x.is_static else x
        for x in operands
    ]


def _typed(x: Any, aval: Any) -> Any:
    """A result as a JAX array, of the weak type that the plain function's has."""
    if is_scaled(x):
        return ScaledArray(_typed(x.data, aval), x.scale)
    x = x if isinstance(x, jax.Array) else jnp.array(x, aval.dtype)
    return _compat.weakly_typed(x) if aval.weak_type and not x.weak_type else x


def _own_buffers(outputs: list[Any], given: Any) -> list[Any]:
    """Give each result buffers of its own, as `jax.jit` does: a shared one cannot be donated."""
    seen = {id(leaf) for leaf in jax.tree.leaves(given)}

    def owned(x: Any) -> Any:
        if isinstance(x, jax.Array) and not _compat.is_traced(x):
            x = jnp.array(x) if id(x) in seen else x
            seen.add(id(x))
        return x

    return jax.tree.map(owned, outputs)


def _enter(operand: Any, table: ScaleTable) -> Value:
    if not is_scaled(operand):
        return Value.of(operand)
    scale = (
        Scale.of(operand.scale)
        if operand.is_static
        else table.atom(
            align_scale(operand.scale, operand.ndim).astype(table.dtype),
            extent=algebra.given_extent(operand.dtype),
        )
    )
    # A copy: JAX may keep the memory of a NumPy array, which the user writes to.
    data = operand.data if isinstance(operand.data, jax.Array) else jnp.array(operand.data)
    return Value.of(ScaledArray(data, scale))


def _leave(value: Value, table: ScaleTable, keep_static: bool) -> Any:
    if not value.is_scalable or not (value.is_scaled or value.constant is not None):
        return value.plain()
    x = within_range(promote(value, table, full=True))
    if x.scale.is_static and keep_static:
        return ScaledArray(x.data, x.scale.value)
    return ScaledArray(x.data, table.output(x.scale))


def evaluate(
    closed: Any, inputs: Sequence[Value], table: ScaleTable, config: ScalifyConfig
) -> list[Value]:
    """Interpret a closed jaxpr, equation by equation, in scaled mode."""
    jaxpr = closed.jaxpr
    env: dict[Any, Value] = {}

    def read(atom: Any) -> Value:
        return Value.of(_typed_literal(atom)) if isinstance(atom, jex_core.Literal) else env[atom]

    for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
        env[var] = _captured(const)
    env.update(zip(jaxpr.invars, inputs, strict=True))
    equations = _live_equations(jaxpr)
    uses = chains.count_uses(jaxpr, equations)
    made_by = makers(jaxpr) if observing.is_observing() else {}
    for eqn in equations:
        with _compat.equation_context(eqn):
            operands = [read(v) for v in eqn.invars]
            outputs = _equation(eqn, operands, table, config)
            outputs = [
                chains.cut(value) if uses[var] > 1 else value
                for var, value in zip(eqn.outvars, outputs, strict=True)
            ]
            if made_by:
                outputs = observing.observed(eqn, operands, outputs, table, made_by)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [_at_one_choice(read(v)) for v in jaxpr.outvars]


def _at_one_choice(value: Value) -> Value:
    if not value.is_scaled:
        return value
    array = at_one_choice(value.array)
    return value if array is value.array else dataclasses.replace(value, array=array)


def _typed_literal(literal: Any) -> Any:
    return np.asarray(literal.val, literal.aval.dtype)


def _captured(const: Any) -> Value:
    """A captured constant has known values: its scale is its RMS over ordinary values.

    Not ordinary are 0, inf, nan and masks. A mask saturates, beyond every ordinary value.
    """
    if _compat.is_traced(const) or not dtypes.is_scalable(const.dtype) or not const.shape:
        return Value.of(const)
    values = np.asarray(const)
    if values.size and np.all(values == values.flat[0]):
        return Value.filled(values, values.flat[0])
    finfo = jnp.finfo(values.dtype)
    wide = values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)
    sizes = np.abs(wide)
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    ordinary = sizes[sizes < min(_MASK, float(finfo.max))]
    scale = algebra.ONE
    if ordinary.size:
        rms = float(ordinary.max()) * float(np.sqrt(np.mean(np.square(ordinary / ordinary.max()))))
        limit = pow2.MAX_EXPONENT
        scale = Scale(max(-limit, min(limit, pow2.floor_exponent(rms))))
    if sizes.size > ordinary.size:
        mask = constant_scale(sizes.max(), values.dtype)
        scale = algebra.join(scale, mask) if ordinary.size else mask
    data = wide / scale.value
    if not np.iscomplexobj(data):
        low, high = float(finfo.min), float(finfo.max)
        data = np.where(np.isfinite(data), np.clip(data, low, high), data)
    scaled = ScaledArray(jnp.asarray(data.astype(values.dtype)), scale)
    nonneg = not np.iscomplexobj(values) and bool(np.all(values >= 0))
    return Value.of(scaled, facts=Facts(nonneg=nonneg))


def _live_equations(jaxpr: Any) -> list[Any]:
    """The equations that an output or an effect depends on."""
    used = {v for v in jaxpr.outvars if not isinstance(v, jex_core.Literal)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in used for v in eqn.outvars):
            used.update(v for v in eqn.invars if not isinstance(v, jex_core.Literal))
            live.append(eqn)
    return live[::-1]


def _equation(eqn: Any, inputs: list[Value], table: ScaleTable, config: Any) -> list[Value]:
    uniform = _uniform(eqn, inputs)
    if uniform is not None:
        return [uniform]
    floating = [v for v in inputs if v.is_scalable]
    # Integers and bools that become float (one-hots) are constants of scale 1.
    becomes_float = eqn.primitive.name == "convert_element_type" and not floating
    becomes_float = becomes_float and dtypes.is_scalable(eqn.outvars[0].aval.dtype)
    meets = becomes_float or any(v.is_scaled or v.uniform is not None for v in floating)
    rule = find_rule(eqn.primitive)
    takes_values = getattr(rule, "takes_values", False)
    if not any(v.is_scaled for v in floating):
        calls = takes_values and sub_jaxprs(eqn.params)
        makes_float = any(dtypes.is_scalable(v.aval.dtype) for v in eqn.outvars)
        if rule is None or not (meets and makes_float or calls):
            return _wrap(eqn, _bind_plain(eqn, [v.plain() for v in inputs]), inputs)
    elif rule is None:
        report_missing(eqn, inputs, config)
        rule = dequantising_rule
    elif (reason := reason_to_dequantise(eqn.primitive)) is not None:
        report_dequantised(eqn, inputs, reason, config)
    full = not traits_of(eqn.primitive.name).elementwise or all(
        v.uniform is not None for v in inputs
    )
    if full:
        inputs = [_at_one_choice(v) for v in inputs]
    else:
        inputs = _with_result_shape(eqn, inputs)
    args = (
        inputs
        if takes_values
        else [promote(v, table, full) if v.is_scalable else v.plain() for v in inputs]
    )
    if not is_given_deferred(rule):
        args = [settled(a) for a in args]
    ctx = RuleContext(
        primitive=eqn.primitive,
        in_avals=tuple(
            var.aval if v.shape == var.aval.shape else var.aval.update(shape=v.shape)
            for var, v in zip(eqn.invars, inputs, strict=True)
        ),
        out_avals=tuple(v.aval for v in eqn.outvars),
        inputs=tuple(inputs),
        table=table,
        config=config,
        eqn=eqn,
        evaluate=evaluate,
    )
    try:
        out = rule(ctx, *args, **eqn.params)
    except Exception as error:
        if not getattr(error, "_jax_scalify_noted", False):
            error.add_note(f"jax_scalify: while applying the scale rule of {describe(eqn, inputs)}")
            error._jax_scalify_noted = True  # type: ignore[attr-defined]
        raise
    return _wrap(eqn, out, inputs, table)


def _with_result_shape(eqn: Any, inputs: list[Value]) -> list[Value]:
    """Give an array the shape of the result, if no array has it: numbers are not filled.

    In `full((2, 3), 3.0) * x` the operand `x` may have the shape `(1, 3)` or `()`.
    """
    aval = eqn.outvars[0].aval
    shape = aval.shape
    arrays = [i for i, v in enumerate(inputs) if v.uniform is None and v.is_scalable]
    if not arrays or any(v.uniform is None and v.shape == shape for v in inputs):
        return inputs
    value = inputs[arrays[0]]
    fill = functools.partial(filled, like=aval)
    x = value.array
    x = with_scale(x, x.scale, fill) if isinstance(x, ScaledArray) else fill(x)
    wide = dataclasses.replace(value, shape=shape, array=x)
    return [wide if v is value else v for v in inputs]


def _uniform(eqn: Any, inputs: list[Value]) -> Value | None:
    """Evaluate an equation of uniform values on 0-d operands; on constants, while tracing."""
    name = eqn.primitive.name
    if name == "optimization_barrier" and len(inputs) == 1 and inputs[0].constant is not None:
        return inputs[0]
    if eqn.primitive.multiple_results or not inputs:
        return None
    if any(v.uniform is None or v.is_scaled for v in inputs):
        return None
    aval = eqn.outvars[0].aval
    if name == "reduce_sum" and not eqn.params["axes"]:
        return inputs[0]
    if traits_of(name).is_view and len(inputs) == 1:
        if not all(v.shape for v in inputs) and not aval.shape:
            return inputs[0]
        if name.startswith(("reduce", "cum")) and 0 in inputs[0].shape:
            return None
        return Value.filled(aval, inputs[0].uniform, facts=inputs[0].facts)
    if not traits_of(name).elementwise:
        return None
    symbolic = _symbolic_scale(eqn, inputs)
    constants = [v.constant for v in inputs]
    is_known = all(c is not None for c in constants)
    out = fold_constants(eqn, constants) if is_known else None
    if out is None and any(v.is_beyond for v in inputs):
        return None
    if is_known:
        if out is None:
            with jax.ensure_compile_time_eval():
                out = np.asarray(_bind_uniform(eqn, inputs))[()]
    elif _keeps_numbers(name) and aval.dtype == inputs[0].dtype:
        out = inputs[0].uniform  # the same scalar is split once
    else:
        out = _bind_uniform(eqn, inputs)
    facts = facts_of(eqn, inputs)
    if aval.shape or out.dtype != aval.dtype:
        return Value.filled(aval, out, facts=facts)
    return Value.of(out, facts=facts, scale=symbolic)


def _keeps_numbers(primitive: str) -> bool:
    """Whether nothing happens to numbers if the dtype stays."""
    return traits_of(primitive).elements == "same" or primitive == "convert_element_type"


def _bind_uniform(eqn: Any, inputs: list[Value]) -> Any:
    if eqn.primitive.name == "convert_element_type" and dtypes.is_narrow_float(
        eqn.params["new_dtype"]
    ):
        return dtypes.cast(jnp.asarray(inputs[0].uniform), eqn.params["new_dtype"])
    return eqn.primitive.bind(*(in_dtype(v.uniform, v.dtype) for v in inputs), **eqn.params)


def _symbolic_scale(eqn: Any, inputs: list[Value]) -> Scale | None:
    """Follow a scale that the user took out with `get_data_and_scale` through its arithmetic."""
    name = eqn.primitive.name
    if not any(v.scale is not None for v in inputs):
        return None
    known = [v.scale if v.scale is not None else _constant_scale(v) for v in inputs]
    scales = [s for s in known if s is not None]
    if len(scales) < len(known):
        return None
    if name == "mul":
        return scales[0] * scales[1]
    if name == "div":
        return scales[0] / scales[1]
    if name == "max":
        return algebra.join(*scales)
    if name in ("integer_pow", "square"):
        return scales[0] ** eqn.params.get("y", 2)
    if name in ("convert_element_type", "copy", "stop_gradient"):
        return scales[0] if eqn.outvars[0].aval.dtype == inputs[0].dtype else None
    return None


def _constant_scale(value: Value) -> Scale | None:
    number = value.constant
    if number is None or number.dtype.kind not in "fiu" or not pow2.is_power_of_two(number):
        return None
    return Scale.of(number)


def _bind_plain(eqn: Any, args: list[Any]) -> Any:
    return eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))


def _wrap(eqn: Any, out: Any, inputs: list[Value], table: ScaleTable | None = None) -> list[Value]:
    """Check what a rule returned against the equation's output types, and add facts."""
    outputs = list(out) if isinstance(out, (list, tuple)) else [out]
    if outputs and all(isinstance(o, Value) for o in outputs):
        return outputs
    if len(outputs) != len(eqn.outvars):
        raise TypeError(
            f"The scale rule of {describe(eqn, inputs)} returned {len(outputs)} results, expected "
            f"{len(eqn.outvars)}."
        )
    facts = facts_of(eqn, inputs)
    values = []
    for o, var in zip(outputs, eqn.outvars, strict=True):
        if isinstance(o, Value):
            values.append(o)
            continue
        if isinstance(o, ScaledArray) and not isinstance(o.scale, Scale) and table is not None:
            if not may_be_powers_of_two(o.scale):
                raise ValueError(
                    f"The scale rule of {describe(eqn, inputs)} returned a scale that is no power "
                    f"of two, {o.scale!r}. Round it down, and multiply the data by the rest."
                )
            static = type(o.scale) in (float, int)
            scale = Scale.of(o.scale) if static else table.atom(align_scale(o.scale, o.ndim))
            o = ScaledArray(o.data, scale)
        if isinstance(o, ScaledArray):
            o = in_reach(o)
        value = Value.of(o, facts=facts, depth=chains.depth(eqn, inputs, o))
        if value.shape != var.aval.shape or value.dtype != var.aval.dtype:
            raise TypeError(
                f"The scale rule of {describe(eqn, inputs)} returned {value.dtype}{value.shape}, "
                f"expected {var.aval.dtype}{var.aval.shape}."
            )
        values.append(value)
    return values
