"""Loops, branches and rematerialisation, rebuilt as functions of data and scales."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import all_equations, depends
from jax_scalify.interpreter.constants import promote
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext, register_scale_rule, register_value_rule
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.rules.bodies.form import (
    Body,
    Form,
    fixpoint,
    interpret,
    join,
    pack,
    scales_of,
    unpack,
)
from jax_scalify.rules.dequantised import own_dtype_rule
from jax_scalify.rules.shared.products import made
from jax_scalify.scales.algebra import LARGEST_EXTENT, ONE


def _loop(
    ctx: RuleContext, make: Callable[[list[Form]], Body], init: list[Value], others: Sequence[Value]
) -> tuple[Body, list[Form], list[Any]]:
    """Return a loop's body, the forms of its carries, and the arrays from which they start.

    In a loop over scaled values, an accumulator that starts from a constant ends up scaled, and
    computed scales end up with the largest extent. Starting from these forms saves interpreting the
    body once more.
    """
    any_scaled = any(v.is_scaled for v in (*init, *others))
    guess = []
    for form in map(Form.of, init):
        is_scalable = any_scaled and dtypes.is_scalable(form.dtype)
        if form.has_scale or (is_scalable and form.kind == "constant" and form.shape):
            known = dict(extent=LARGEST_EXTENT, holds_data=dtypes.is_narrow(form.dtype))
            form = dataclasses.replace(form, kind="scaled", constant=None, **known)
        guess.append(form)
    body, forms = fixpoint(make, guess)
    start = []
    for form, v in zip(forms, init, strict=True):
        # A carry that keeps its scale must not start from the small scale of the constant `2**-20`.
        if form.keeps_scale and v.constant is not None and 0 < abs(v.constant) < 1:
            v = Operand(v.whole(), ONE, facts=v.facts)
        start += form.pack(v, ctx.table)
    return body, forms, start


def _held(forms: list[Form], before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Return the carries after a step, with the scales that they keep: see `Form.keeps_scale`."""
    out = list(after)
    for at, form in scales_of(forms).items():
        if form.keeps_scale:
            # A carry of zeros has the scale 0, and takes the first other scale. The carry holds
            # values, so its array is right at any scale.
            out[at] = jnp.where(before[at] == 0, after[at], before[at])
    return out


@register_value_rule("scan")
def scan_rule(
    ctx: RuleContext, *args: Value, jaxpr: Any, length: int, **params: Any
) -> list[Value]:
    """Interpret the body on data and scales; each step of scanned values has its own scale."""
    num_consts, num_carry = _compat.scan_counts(params)
    consts, init = list(args[:num_consts]), list(args[num_consts : num_consts + num_carry])
    xs = list(args[num_consts + num_carry :])
    const_forms, stacked = [Form.of(v) for v in consts], [Form.of(v) for v in xs]
    steps = [form.slice() for form in stacked]

    def make(carry_forms: list[Form]) -> Body:
        return interpret(ctx, jaxpr, [*const_forms, *carry_forms, *steps])

    captured = pack(const_forms, consts, ctx.table)
    body, carry_forms, start = _loop(ctx, make, init, [*consts, *xs])
    y_forms = [form.as_array() for form in body.forms[num_carry:]]
    given = [x for v, form in zip(xs, stacked, strict=True) for x in _scanned(ctx, v, form, length)]
    scanned = [array for array, is_sliced in given if is_sliced]
    varies = [False] * len(captured) + [True] * len(start) + [sliced for _, sliced in given]
    y_count = sum(form.array_count for form in y_forms)
    y_varies = depends(body.jaxpr, varies)[len(body.jaxpr.out_avals) - y_count :]
    shared, together, alone = _stacked_scales(y_forms, y_varies)

    def step(carry: Any, sliced: Any) -> Any:
        rest, (before, _) = iter(sliced), carry
        x_arrays = [next(rest) if is_sliced else array for array, is_sliced in given]
        out = body([*captured, *before, *x_arrays], [*carry_forms, *y_forms])
        after, ys = _held(carry_forms, before, out[: len(before)]), out[len(before) :]
        # Shape (count,); the scan stacks the tables of all steps to (length, count). Scales that
        # all steps share are a carry: each step overwrites them with the same scales.
        tables = [jnp.stack([ys[at] for at in which]) for which in together]
        return (after, [ys[at] for at in shared]), ([ys[at] for at in alone], tables)

    # A loop of length 0 returns these scales.
    zeros = [
        _compat.as_varying(jnp.zeros(f.scale_shape, ctx.table.dtype), f.varying)
        for f in shared.values()
    ]
    options = {name: params[name] for name in ("reverse", "unroll")}
    options["length"] = None if scanned else length  # a symbolic length comes from arrays only
    carry, (own, tables) = lax.scan(step, (start, zeros), scanned, **options)
    ys = dict(zip([*alone, *shared], [*own, *carry[1]], strict=True))
    for which, table in zip(together, tables, strict=True):
        ys |= {at: table[:, column] for column, at in enumerate(which)}
    for at, form in scales_of(y_forms).items():
        if at not in shared or form.scale_shape:
            # A scale for each step: shape (length, 1, 1) beside data of shape (length, 6, 6).
            shape = form.scale_shape or (1,) * len(form.shape)
            ys[at] = jnp.reshape(ys[at], (1 if at in shared else length, *shape))
    forms = [dataclasses.replace(f, shape=(length, *f.shape)) for f in y_forms]
    values = unpack(carry_forms, carry[0], ctx.table)
    return [*values, *unpack(forms, [ys[at] for at in sorted(ys)], ctx.table)]


def _stacked_scales(
    forms: list[Form], varies: list[bool]
) -> tuple[dict[int, Form], list[list[int]], list[int]]:
    """Divide the arrays of stacked results into shared scales, tables of scales, and the rest.

    `varies` marks the arrays that may differ between steps. Scales that all steps share are
    carried. Without this, each block of a `lax.map` with `batch_size` would have its own scale.
    Reshaping the blocks to one axis would then give each element of this axis a scale. Other scalar
    scales are stacked together as one array, because XLA launches one kernel on a GPU for each
    array that a step writes.
    """
    scales = scales_of(forms)
    shared = {at: form for at, form in scales.items() if not varies[at]}
    groups: dict[frozenset[Any], list[int]] = {}
    for at, form in scales.items():
        if at not in shared and not form.scale_shape:
            groups.setdefault(form.varying, []).append(at)
    together = list(groups.values())
    return shared, together, sorted(set(range(len(varies))).difference(shared, *together))


def _scanned(ctx: RuleContext, x: Value, form: Form, length: int) -> list[tuple[Any, bool]]:
    """Return the arrays of a scanned value, and whether the scan slices them.

    It slices data, and scales that differ along the scanned axis.
    """
    arrays = form.pack(x, ctx.table)
    if form.kind == "uniform":
        return [(arrays[0], False)]
    shape = form.slice().scale_shape
    differs = bool(form.scale_shape) and form.scale_shape[0] != 1
    scales = [(a.reshape((length, *shape) if differs else shape), differs) for a in arrays[1:]]
    return [*((a, True) for a in arrays[:1]), *scales]


@register_value_rule("while")
def while_rule(ctx: RuleContext, *args: Value, **params: Any) -> list[Value]:
    """Interpret condition and body on data and scales."""
    cond_jaxpr, body_jaxpr = params["cond_jaxpr"], params["body_jaxpr"]
    cond_nconsts, body_nconsts = params["cond_nconsts"], params["body_nconsts"]
    if cond_jaxpr.out_avals[0].shape:
        cond_jaxpr, body_jaxpr = _of_a_batch(cond_jaxpr, cond_nconsts, body_jaxpr, body_nconsts)
        # The new body evaluates the condition, so it takes the constants of the condition as well.
        args = (*args[:cond_nconsts], *args)
        body_nconsts += cond_nconsts
    cond_consts, body_consts = args[:cond_nconsts], args[cond_nconsts:][:body_nconsts]
    init = list(args[cond_nconsts + body_nconsts :])
    cond_forms, body_forms = [Form.of(v) for v in cond_consts], [Form.of(v) for v in body_consts]

    def make(carry_forms: list[Form]) -> Body:
        return interpret(ctx, body_jaxpr, [*body_forms, *carry_forms])

    body, forms, start = _loop(ctx, make, init, body_consts)
    test = interpret(ctx, cond_jaxpr, [*cond_forms, *forms])
    # `lax.while_loop` needs the condition as an array, even if it is constant.
    plain = [dataclasses.replace(f, kind="plain", constant=None) for f in test.forms]
    captured = pack(cond_forms, cond_consts, ctx.table), pack(body_forms, body_consts, ctx.table)
    out = lax.while_loop(
        lambda carry: test([*captured[0], *carry], plain)[0],
        lambda carry: _held(forms, carry, body([*captured[1], *carry], forms)),
        start,
    )
    return unpack(forms, out, ctx.table)


def _of_a_batch(cond: Any, cond_count: int, body: Any, body_count: int) -> tuple[Any, Any]:
    """Rewrite a `while` whose condition `vmap` has batched.

    The new loop runs while any example runs. A step leaves finished examples unchanged.
    """
    goes_on, step = jex_core.jaxpr_as_fun(cond), jex_core.jaxpr_as_fun(body)
    avals = [*cond.in_avals[:cond_count], *body.in_avals]
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]

    def some_run(*args: Any) -> Any:
        return jnp.any(goes_on(*args)[0])

    def step_of_running(*args: Any) -> list[Any]:
        before = args[cond_count + body_count :]
        (running,) = goes_on(*args[:cond_count], *before)
        return [
            # `running` has the batch axes, which are the first axes of each carry.
            jnp.where(running.reshape(running.shape + (1,) * (a.ndim - running.ndim)), a, b)
            for a, b in zip(step(*args[cond_count:]), before, strict=True)
        ]

    carry = avals[cond_count + body_count :]
    return (
        jax.make_jaxpr(some_run)(*avals[:cond_count], *carry),
        jax.make_jaxpr(step_of_running)(*avals),
    )


@register_value_rule("cond")
def cond_rule(
    ctx: RuleContext, index: Plain, *args: Value, branches: Any, **params: Any
) -> list[Value]:
    """A result is scaled if any branch scales it; its scale is static if all branches agree."""
    forms = [Form.of(v) for v in args]
    bodies = [interpret(ctx, branch, forms) for branch in branches]
    results = zip(*(body.forms for body in bodies), strict=True)
    joined = [functools.reduce(join, forms_of_result) for forms_of_result in results]
    calls = [lambda *arrays, body=body: body(arrays, joined) for body in bodies]
    operands = pack(forms, args, ctx.table)
    if (branches_platforms := params.get("branches_platforms")) is None:
        out = lax.switch(index.whole(), calls, *operands)
    else:
        # JAX lowers only the branches of the platforms at hand. Others need not compile there.
        named = {
            platform: call
            for call, platforms in zip(calls, branches_platforms, strict=True)
            for platform in platforms or ["default"]
        }
        out = lax.platform_dependent(*operands, **named)
    return unpack(joined, out, ctx.table)


@register_value_rule("remat2")
def remat_rule(ctx: RuleContext, *args: Value, jaxpr: Any, **params: Any) -> list[Value]:
    """Interpret the body on data and scales; it is rematerialised as before."""
    forms = [Form.of(v) for v in args]
    body = interpret(ctx, _compat.close_jaxpr(jaxpr, ()), forms)
    # `remat2` holds an open jaxpr, so constants of the body are operands.
    operands = [*body.jaxpr.consts, *pack(forms, args, ctx.table)]
    out = ctx.bind(*operands, jaxpr=_compat.open_jaxpr(body.jaxpr), **params)
    return unpack(body.forms, out, ctx.table)


@register_value_rule("custom_linear_solve")
def custom_linear_solve_rule(
    ctx: RuleContext, *args: Value, const_lengths: Any, jaxprs: Any, **params: Any
) -> list[Value]:
    """Interpret a direct solver in place; run an iterative solver on plain values, at `b.scale`."""
    rest = list(args)
    consts = {}
    for name, count in const_lengths._asdict().items():
        consts[name], rest = rest[:count], rest[count:]
    # `jnp.linalg.solve` is direct. `jax.scipy.sparse.linalg.cg` is a loop.
    names = {e.primitive.name for e in all_equations(jaxprs.solve.jaxpr)}
    if names.isdisjoint(("while", "scan")):
        return ctx.scale_jaxpr(jaxprs.solve, [*consts["solve"], *rest])
    plain = [ctx.dequantise(v, v.dtype) for v in args]
    out = ctx.bind(*plain, const_lengths=const_lengths, jaxprs=jaxprs, **params)
    scales = [promote(v, ctx.table, full=True).scale for v in rest if v.is_scalable]
    if len(scales) != len(out):  # the solver has auxiliary results, such as an iteration count
        return [Plain.of(x) for x in out]
    return [made(x, ONE, scale, x.dtype) for x, scale in zip(out, scales, strict=True)]


@register_scale_rule("debug_callback", "debug_print", elements="new")
def debug_rule(ctx: RuleContext, *args: Any, **params: Any) -> Any:
    """Pass plain values in at least float32: the user sees values, not data."""
    return ctx.bind(*map(ctx.dequantise, args), **params)


for _reason, _names in (
    (
        "its body is evaluated on plain values",
        "remat_opt linear_call custom_vmap_call custom_partitioning run_state custom_lin stage",
    ),
    (
        "what it calls is outside the program and expects plain values",
        "pure_callback io_callback ffi_call call_exported",
    ),
    ("a `Ref` holds plain values", "get swap addupdate freeze new_ref dce_sink"),
):
    register_scale_rule(
        *_names.split(), family="control flow", dequantises=_reason, elements="new"
    )(own_dtype_rule)
