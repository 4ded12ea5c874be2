"""Loops, branches and rematerialisation, rebuilt as functions of data and scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import all_equations, depends
from jax_scalify.interpreter.constants import promote
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext, register_scale_rule, register_value_rule
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.rules.bodies.form import Body, Form, fixpoint, interpret, join, pack, unpack
from jax_scalify.rules.dequantised import own_dtype_rule
from jax_scalify.rules.shared.products import made
from jax_scalify.scales.algebra import LARGEST_EXTENT, ONE


def _first_guess(values: list[Value], others: list[Value]) -> list[Form]:
    """Return the forms of the carries from which the fixpoint iteration starts.

    In a loop over scaled values, an accumulator that starts from a constant ends up scaled, and
    computed scales end up with the largest extent. Starting from these forms saves interpreting the
    body once more.
    """
    any_scaled = any(v.is_scaled for v in (*values, *others))
    forms = [Form.of(v) for v in values]
    forms = [
        dataclasses.replace(f, extent=LARGEST_EXTENT, holds_data=dtypes.is_narrow(f.dtype))
        if f.has_scale
        else f
        for f in forms
    ]
    return [
        f.scaled()
        if any_scaled and f.kind == "constant" and f.shape and dtypes.is_scalable(f.dtype)
        else f
        for f in forms
    ]


def _with_room(forms: list[Form], values: list[Value]) -> list[Value]:
    """Give small constants the scale 1 if their carry keeps its scale.

    A carry that starts from the constant `2**-20` would otherwise keep this scale in all steps.
    """
    return [
        Operand(v.whole(), ONE, facts=v.facts)
        if _keeps_scale(form) and v.constant is not None and 0 < abs(v.constant) < 1
        else v
        for form, v in zip(forms, values, strict=True)
    ]


def _keeps_scale(form: Form) -> bool:
    """Return whether a carry keeps its scale from step to step: see `_hold`."""
    is_array = form.has_scale and bool(form.shape) and not form.holds_data
    return is_array and jnp.finfo(form.dtype).bits >= 32


def _hold(forms: list[Form], before: Any, after: Any) -> list[Any]:
    """Keep the nonzero scales of float32 carries from step to step.

    A rule's scale is an estimate, and its error compounds over the steps. A scale that doubles in
    each of 1,000 steps leaves the range of every dtype, even if the values do not grow. A 0-d carry
    cannot drift, because its scale is its exponent. A carry of 16 bits takes the scale of each
    step, because layers of small weights would make its data underflow at a constant scale.
    """
    old, new, out = iter(before), iter(after), []
    for form in forms:
        was, now = ([next(a) for _ in range(form.array_count)] for a in (old, new))
        if _keeps_scale(form):
            now = [now[0], jnp.where(was[1] == 0, now[1], was[1])]
        out += now
    return out


@register_value_rule("scan")
def scan_rule(
    ctx: RuleContext,
    *args: Value,
    jaxpr: Any,
    length: int,
    reverse: bool,
    unroll: Any,
    **params: Any,
) -> list[Value]:
    """Interpret the body on data and scales; each step of scanned values has its own scale."""
    num_consts, num_carry = _compat.scan_counts(params)
    consts, init = list(args[:num_consts]), list(args[num_consts : num_consts + num_carry])
    xs = list(args[num_consts + num_carry :])
    const_forms, stacked = [Form.of(v) for v in consts], [Form.of(v) for v in xs]
    steps = [form.slice() for form in stacked]

    def make(carry_forms: list[Form]) -> Body:
        return interpret(ctx, jaxpr, [*const_forms, *carry_forms, *steps])

    body, carry_forms = fixpoint(make, _first_guess(init, [*consts, *xs]), num_carry)
    y_forms = [  # a "uniform" result has one number per step
        dataclasses.replace(f, kind="plain") if f.kind == "uniform" else f
        for f in body.forms[num_carry:]
    ]
    captured = pack(const_forms, consts, ctx.table)
    start = pack(carry_forms, _with_room(carry_forms, init), ctx.table)
    scanned, whole = [], []  # arrays that are sliced, and scales that all steps share
    for form, value in zip(stacked, xs, strict=True):
        arrays = form.pack(value, ctx.table)
        if form.kind == "uniform":
            whole.append(arrays)
        elif form.has_scale and (not form.scale_shape or form.scale_shape[0] == 1):
            scanned.append(arrays[0])
            whole.append([None, arrays[1].reshape(form.slice().scale_shape)])
        else:
            scanned += arrays[:1]
            scales = [a.reshape((length, *form.slice().scale_shape)) for a in arrays[1:]]
            scanned += scales
            whole.append([None] * len(arrays))

    sliced = [a is None for arrays in whole for a in arrays]
    shared = _shared_scales(body, y_forms, [False] * len(captured) + [True] * len(start) + sliced)
    together = _scales_stacked_together(y_forms, shared)

    def step(carry: Any, sliced: Any) -> Any:
        rest, (before, _) = iter(sliced), carry
        x_arrays = [next(rest) if a is None else a for arrays in whole for a in arrays]
        out = body([*captured, *before, *x_arrays], [*carry_forms, *y_forms], ctx.table.dtype)
        after = _hold(carry_forms, before, out[: len(before)])
        ys = _grouped(y_forms, out[len(before) :])
        scales = [y[1] for y, is_shared in zip(ys, shared, strict=True) if is_shared]
        tables = [jnp.stack([ys[i][1] for i in which]) for which in together]
        alone = {i for which in together for i in which}
        own = [
            y[:1] if is_shared or i in alone else y
            for i, (y, is_shared) in enumerate(zip(ys, shared, strict=True))
        ]
        return (after, scales), (own, tables)

    like = [f for f, is_shared in zip(y_forms, shared, strict=True) if is_shared]
    scales = [
        _compat.as_varying(jnp.zeros(f.scale_shape, ctx.table.dtype), f.varying) for f in like
    ]
    given = None if scanned else length  # `lax.scan` takes a symbolic length from arrays only
    carry, (ys, tables) = lax.scan(
        step, (start, scales), scanned, given, reverse=reverse, unroll=unroll
    )
    for which, table in zip(together, tables, strict=True):
        for column, i in enumerate(which):
            ys[i] = [*ys[i], table[:, column]]
    values = unpack(carry_forms, carry[0], ctx.table)
    return [*values, *_stacked(ctx, y_forms, ys, carry[1], length)]


def _grouped(forms: list[Form], arrays: list[Any]) -> list[list[Any]]:
    """Divide a sequence of arrays among the forms that they belong to."""
    rest = iter(arrays)
    return [[next(rest) for _ in range(form.array_count)] for form in forms]


def _shared_scales(body: Body, forms: list[Form], varies: list[bool]) -> list[bool]:
    """Return for each stacked result whether all steps share its scale.

    They do if the scale depends neither on the carry nor on scanned arrays. Without this, each
    block of a `lax.map` with `batch_size` would have its own scale. Reshaping the blocks to one
    axis would then give each element of this axis a scale.
    """
    arrays = sum(form.array_count for form in forms)
    found = _grouped(forms, depends(body.jaxpr, varies)[-arrays or len(varies) :])
    return [form.has_scale and not of_arrays[1] for form, of_arrays in zip(forms, found)]


def _scales_stacked_together(forms: list[Form], shared: list[bool]) -> list[list[int]]:
    """Return groups of stacked results whose scales are stacked as one array.

    On a GPU, XLA launches one kernel for each array that a step writes. One array for all scales of
    a group saves launches.
    """
    groups: dict[frozenset[Any], list[int]] = {}
    for i, (form, is_shared) in enumerate(zip(forms, shared, strict=True)):
        if form.has_scale and not is_shared and not form.scale_shape:
            groups.setdefault(form.varying, []).append(i)
    return list(groups.values())


def _stacked(
    ctx: RuleContext, forms: list[Form], ys: list[Any], shared: list[Any], length: int
) -> list[Value]:
    """Return the values of stacked results, with one scale per step unless all steps share it."""
    rest, values = iter(shared), []
    for form, own in zip(forms, ys, strict=True):
        form = dataclasses.replace(form, shape=(length, *form.shape))
        if form.has_scale and len(own) == 1:
            scale = next(rest)
            own = [*own, scale.reshape((1, *scale.shape)) if scale.ndim else scale]
        elif form.has_scale:
            shape = form.scale_shape or (1,) * (len(form.shape) - 1)
            own = [own[0], jnp.reshape(own[1], (length, *shape))]
        values.append(form.unpack(own, ctx.table))
    return values


@register_value_rule("while")
def while_rule(
    ctx: RuleContext,
    *args: Value,
    cond_nconsts: int,
    cond_jaxpr: Any,
    body_nconsts: int,
    body_jaxpr: Any,
    **_: Any,
) -> list[Value]:
    """Interpret condition and body on data and scales."""
    if cond_jaxpr.out_avals[0].shape:
        cond_jaxpr, body_jaxpr = _of_a_batch(cond_jaxpr, cond_nconsts, body_jaxpr, body_nconsts)
        args = (*args[:cond_nconsts], *args)
        body_nconsts += cond_nconsts
    cond_consts, body_consts = args[:cond_nconsts], args[cond_nconsts:][:body_nconsts]
    init = list(args[cond_nconsts + body_nconsts :])
    cond_forms, body_forms = [Form.of(v) for v in cond_consts], [Form.of(v) for v in body_consts]

    def make(carry_forms: list[Form]) -> Body:
        return interpret(ctx, body_jaxpr, [*body_forms, *carry_forms])

    body, forms = fixpoint(make, _first_guess(init, list(body_consts)), len(init))
    test = interpret(ctx, cond_jaxpr, [*cond_forms, *forms])
    # `lax.while_loop` needs the condition as an array, even if it is constant.
    plain = [dataclasses.replace(f, kind="plain", constant=None) for f in test.forms]
    captured = pack(cond_forms, cond_consts, ctx.table), pack(body_forms, body_consts, ctx.table)
    out = lax.while_loop(
        lambda carry: test([*captured[0], *carry], plain, ctx.table.dtype)[0],
        lambda carry: _hold(forms, carry, body([*captured[1], *carry], forms, ctx.table.dtype)),
        pack(forms, _with_room(forms, init), ctx.table),
    )
    return unpack(forms, out, ctx.table)


def _of_a_batch(cond: Any, cond_count: int, body: Any, body_count: int) -> tuple[Any, Any]:
    """Rewrite a `while` whose condition `vmap` has batched.

    The new loop runs while any example runs. A step leaves finished examples unchanged.
    """
    carry = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in body.in_avals[body_count:]]
    cond_consts, body_consts = (
        [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jaxpr.in_avals[:count]]
        for jaxpr, count in ((cond, cond_count), (body, body_count))
    )

    def goes_on(*args: Any) -> Any:
        return jex_core.jaxpr_as_fun(cond)(*args)[0]

    def step(*args: Any) -> list[Any]:
        before = args[cond_count + body_count :]
        running = goes_on(*args[:cond_count], *before)
        after = jex_core.jaxpr_as_fun(body)(*args[cond_count:])
        return [
            jnp.where(running.reshape(running.shape + (1,) * (a.ndim - running.ndim)), a, b)
            for a, b in zip(after, before, strict=True)
        ]

    return (
        jax.make_jaxpr(lambda *args: jnp.any(goes_on(*args)))(*cond_consts, *carry),
        jax.make_jaxpr(step)(*cond_consts, *body_consts, *carry),
    )


@register_value_rule("cond")
def cond_rule(
    ctx: RuleContext,
    index: Plain,
    *args: Value,
    branches: Any,
    branches_platforms: Any = None,
    **_: Any,
) -> list[Value]:
    """A result is scaled if any branch scales it; its scale is static if all branches agree."""
    forms = [Form.of(v) for v in args]
    bodies = [interpret(ctx, branch, forms) for branch in branches]
    joined = bodies[0].forms
    for body in bodies[1:]:
        joined = [join(a, b) for a, b in zip(joined, body.forms, strict=True)]
    calls = [lambda *arrays, body=body: body(arrays, joined, ctx.table.dtype) for body in bodies]
    operands = pack(forms, args, ctx.table)
    if branches_platforms is None:
        out = lax.switch(index.whole(), calls, *operands)
    else:
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
    names = {e.primitive.name for e in all_equations(jaxprs.solve.jaxpr)}
    if names.isdisjoint(("while", "scan")):
        return ctx.scale_jaxpr(jaxprs.solve, [*consts["solve"], *rest])
    plain = [ctx.dequantise(v, v.dtype) if isinstance(v, Operand) else v.whole() for v in args]
    out = ctx.bind(*plain, const_lengths=const_lengths, jaxprs=jaxprs, **params)
    scales = [promote(v, ctx.table, full=True).scale for v in rest if v.is_scalable]
    if len(scales) != len(out):  # the solver has auxiliary results, such as an iteration count
        return [Plain.of(x) for x in out]
    return [made(x, ONE, scale, x.dtype) for x, scale in zip(out, scales, strict=True)]


@register_scale_rule("debug_callback", "debug_print", elements="new")
def debug_rule(ctx: RuleContext, *args: Any, **params: Any) -> Any:
    """Pass plain values in at least float32: the user sees values, not data."""
    plain = [ctx.dequantise(x) if isinstance(x, ScaledArray) else x for x in args]
    return ctx.bind(*plain, **params)


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
