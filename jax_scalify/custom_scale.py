"""`custom_scale`: scale rules for functions, as `jax.custom_vjp` has derivative rules for them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_scalify import _compat, dtypes


class custom_scale:  # noqa: N801  (a decorator, as `jax.custom_vjp` is)
    """Give a function a rule for scales, and optionally one for the scales of its cotangents.

    Without `scalify` the function is what it was; so are its derivatives. Inside, an equation of
    its own stands for each call, and the rules are used where an operand is scaled, under `jit`,
    `grad` (inside `scalify`), `vmap`, `scan`, control flow and `jax.checkpoint`.

    The rules take the arguments of the function, each floating array as a `ScaledArray` whose
    data has the array's shape and dtype, everything else as it is. A scale is a power of two that
    supports `*`, `/`, integer `**` and any `jax.numpy` function; `x.to_array(jnp.float32)` is the
    plain value. A rule returns what the function returns, with a `ScaledArray` of the same shape
    and dtype for each floating result (a Python float as its scale is a static one). No rule
    should choose a scale by looking at data.

    Args:
        fun: a function of arrays, or pytrees of arrays. What it closes over has no derivative.
        static_argnames: names of arguments that are not arrays (an axis, a flag). Rules get them
            by keyword.

    Raises:
        TypeError: if `fun` or a rule is not callable or does not take the arguments; when called,
            if a rule returns another structure, shape or dtype than the function.

    Source: DESIGN after Balanca et al. 2024, section 3.3 ("custom scale propagation rules").

    Example:
        >>> @jsa.custom_scale
        ... def silu(x):
        ...     return x * jax.nn.sigmoid(x)
        >>> @silu.defscale
        ... def silu_scale(x):
        ...     gate = jax.nn.sigmoid(x.to_array(jnp.float32))
        ...     return jsa.ScaledArray((x.data * gate).astype(x.dtype), x.scale)
        >>> x = jsa.as_scaled_array(jnp.float32([2.0, 4.0]), scale=2.0)
        >>> print(jsa.scalify(silu)(x).scale)
        2.0
    """

    def __init__(self, fun: Callable | None = None, *, static_argnames: Sequence[str] | str = ()):
        names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
        self.static_argnames = names
        self._rule: Callable | None = None
        self._vjp_rule: Callable | None = None
        if fun is not None:
            self._set_function(fun)

    def __new__(cls, fun: Callable | None = None, **options: Any) -> Any:
        """`custom_scale(static_argnames=...)` is a decorator."""
        if fun is None:
            return functools.partial(cls, **options)
        return super().__new__(cls)

    def _set_function(self, fun: Callable) -> None:
        if not callable(fun):
            raise TypeError(f"`fun` must be callable, got {type(fun).__name__}.")
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._signature = inspect.signature(fun)
        unknown = [n for n in self.static_argnames if n not in self._signature.parameters]
        if unknown:
            raise TypeError(
                f"`static_argnames` of `{self._name}` must be among "
                f"{list(self._signature.parameters)}, got {unknown}."
            )

    def defscale(self, rule: Callable) -> Callable:
        """Define the rule: the arguments of the function, floating ones as `ScaledArray`."""
        self._rule = self._checked_rule(rule, "defscale", 0)
        return rule

    def defscale_vjp(self, rule: Callable) -> Callable:
        """Define the cotangents' rule: the arguments, then the results' cotangents.

        It returns a tuple, as the backward rule of `jax.custom_vjp` does: for each argument that
        is not static a cotangent of its structure, shapes and dtypes, or None for one that has no
        floating leaves. Forward-mode derivatives are then refused, as with `jax.custom_vjp`.
        """
        self._vjp_rule = self._checked_rule(rule, "defscale_vjp", 1)
        return rule

    def _checked_rule(self, rule: Callable, method: str, more: int) -> Callable:
        if not callable(rule):
            raise TypeError(
                f"The rule given to `{self._name}.{method}` must be callable, got "
                f"{type(rule).__name__}."
            )
        params = self._signature.parameters.values()
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in params):
            return rule
        names = [p.name for p in params if p.name not in self.static_argnames]
        positional = [None] * (len(names) + more)
        try:
            inspect.signature(rule).bind(*positional, **dict.fromkeys(self.static_argnames))
        except TypeError as error:
            wanted = [*names, *["cotangent"] * more, *(f"{n}=" for n in self.static_argnames)]
            raise TypeError(
                f"The rule given to `{self._name}.{method}` must take ({', '.join(wanted)}), got "
                f"{inspect.signature(rule)}: {error}."
            ) from None
        return rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        if self.static_argnames:
            bound.apply_defaults()
        static = {n: bound.arguments.pop(n) for n in self.static_argnames if n in bound.arguments}
        operands = tuple(bound.arguments.values())
        by_name = [p.kind for p in self._signature.parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL in by_name or inspect.Parameter.VAR_KEYWORD in by_name:
            operands, keywords = bound.args, bound.kwargs
            if keywords:
                raise TypeError(f"`{self._name}` takes positional arrays only, got {keywords}.")
            fun = functools.partial(self._fun, **static)
        else:
            fun = _by_name(self._fun, tuple(bound.arguments), static)
        leaves, tree = jax.tree.flatten(operands)
        for leaf in leaves:
            if dtypes.leaf_dtype(leaf) is None:
                raise TypeError(
                    f"`{self._name}` takes arrays, got {type(leaf).__name__}; name arguments that "
                    "are not arrays in `static_argnames`."
                )
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        if self._rule is None and self._vjp_rule is None:
            return fun(*jax.tree.unflatten(tree, arrays))
        rule = None if self._rule is None else functools.partial(self._rule, **static)
        call = _Call(self._name, fun, rule, tree)
        if self._vjp_rule is None:
            return call(arrays)
        vjp_rule = functools.partial(self._vjp_rule, **static)
        return _with_vjp(call, vjp_rule)(arrays)


def _by_name(fun: Callable, names: tuple[str, ...], static: dict[str, Any]) -> Callable:
    """The function of its dynamic arguments in order."""
    return lambda *operands: fun(**dict(zip(names, operands, strict=True)), **static)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call of a function with a rule, on flat arrays."""

    name: str
    fun: Callable
    rule: Callable | None
    tree: Any

    def __call__(self, arrays: Sequence[Any]) -> Any:
        out_tree = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal out_tree
            out, out_tree = jax.tree.flatten(self.fun(*jax.tree.unflatten(self.tree, arrays)))
            return out

        closed = jax.make_jaxpr(flat)(*arrays)
        opened = _compat.close_jaxpr(_compat.open_jaxpr(closed), ())
        applied = AppliedRule(self.name, self.rule, self.tree, out_tree, len(closed.consts))
        out = custom_scale_p.bind(*closed.consts, *arrays, jaxpr=opened, applied=applied)
        return jax.tree.unflatten(out_tree, out)


def _with_vjp(call: _Call, vjp_rule: Callable) -> Callable:
    """The call, its derivative a call of the plain derivative with the cotangents' rule."""
    function = jax.custom_vjp(call)

    def forward(arrays: list[Any]) -> Any:
        return call(arrays), arrays

    def backward(arrays: list[Any], cotangents: Any) -> Any:
        floating = [i for i, a in enumerate(arrays) if dtypes.is_scalable(a.dtype)]

        def gradients(*operands: Any) -> Any:
            *args, cotangents = operands
            leaves = jax.tree.leaves(tuple(args))

            def of_floating(*xs: Any) -> Any:
                full = list(leaves)
                for i, x in zip(floating, xs, strict=True):
                    full[i] = x
                return call.fun(*jax.tree.unflatten(call.tree, full))

            slopes = jax.vjp(of_floating, *(leaves[i] for i in floating))[1](cotangents)
            full = [None] * len(leaves)
            for i, slope in zip(floating, slopes, strict=True):
                full[i] = slope
            return jax.tree.unflatten(call.tree, full)

        leaves, tree = jax.tree.flatten((*jax.tree.unflatten(call.tree, arrays), cotangents))
        name = f"{call.name}, cotangents"
        out = _Call(name, gradients, vjp_rule, tree)(leaves)
        rest = iter(jax.tree.leaves(out))
        return (
            [
                next(rest) if i in floating else np.zeros(a.shape, jax.dtypes.float0)
                for i, a in enumerate(arrays)
            ],
        )

    function.defvjp(forward, backward)
    return function


@dataclasses.dataclass(frozen=True, eq=False)
class AppliedRule:
    """A rule with the structures of one call.

    Attributes:
        name: of the function, for messages.
        rule: of the function's arguments; None to propagate through its body.
        in_tree, out_tree: of arguments and results.
        num_consts: arrays before the arguments, that the function closes over.
        batched: for each enclosing `vmap`, innermost first, which arguments have its axis (in
            front) and its size.
    """

    name: str
    rule: Callable | None
    in_tree: Any
    out_tree: Any
    num_consts: int
    batched: tuple[tuple[tuple[bool, ...], int], ...] = ()


custom_scale_p = Primitive("custom_scale")
custom_scale_p.multiple_results = True


@custom_scale_p.def_impl
def _impl(*arrays: Any, jaxpr: Any, applied: AppliedRule) -> list[Any]:
    return jex_core.jaxpr_as_fun(jaxpr)(*arrays)


@custom_scale_p.def_abstract_eval
def _abstract(*arrays: Any, jaxpr: Any, applied: AppliedRule) -> list[Any]:
    return list(jaxpr.out_avals)


mlir.register_lowering(custom_scale_p, mlir.lower_fun(_impl, multiple_results=True))


def _jvp(primals: Any, tangents: Any, *, jaxpr: Any, applied: AppliedRule) -> Any:
    """The derivative of the plain function: without a rule of its own it needs no equation."""
    moved = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_moved(*xs: Any) -> list[Any]:
        full = list(primals)
        for i, x in zip(moved, xs, strict=True):
            full[i] = x
        return jex_core.jaxpr_as_fun(jaxpr)(*full)

    outputs = custom_scale_p.bind(*primals, jaxpr=jaxpr, applied=applied)
    slopes = jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])[1]
    slopes = [
        s if dtypes.is_scalable(aval.dtype) else ad.Zero(aval.to_tangent_aval())
        for s, aval in zip(slopes, jaxpr.out_avals, strict=True)
    ]
    return outputs, slopes


ad.primitive_jvps[custom_scale_p] = _jvp


def _batch(args: Any, dims: Any, *, jaxpr: Any, applied: AppliedRule) -> Any:
    (size,) = {a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None}
    args = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]
    in_axes = [None if d is None else 0 for d in dims]
    batched = jax.make_jaxpr(jax.vmap(jex_core.jaxpr_as_fun(jaxpr), in_axes, axis_size=size))(*args)
    flags = tuple(d is not None for d in dims[applied.num_consts :])
    applied = dataclasses.replace(applied, batched=(*applied.batched, (flags, size)))
    out = custom_scale_p.bind(*args, jaxpr=batched, applied=applied)
    return out, [0] * len(out)


batching.primitive_batchers[custom_scale_p] = _batch
