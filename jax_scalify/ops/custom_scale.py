"""`custom_scale`: scale rules for functions, as `jax.custom_vjp` defines derivative rules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import LazyJaxpr, as_function, of_some
from jax_scalify.primitives.custom_scale import AppliedRule, custom_scale_p


class custom_scale:  # noqa: N801  (a decorator, as `jax.custom_vjp` is)
    """Define a scale rule for a function, and optionally a scale rule for its cotangents.

    Outside `scalify`, the function and its derivatives are unchanged. Inside, each call is one
    equation, and the rule is applied if an operand is scaled: under `jit`, `grad` (inside
    `scalify`), `vmap`, `scan`, control flow and `jax.checkpoint`.

    A rule takes the arguments of the function. Each floating array is a `ScaledArray` whose data
    has the array's shape and dtype, and other arguments are unchanged. A scale is a power of two
    that supports `*`, `/`, integer `**` and `.maximum(other)`; `jnp.asarray(x.scale)` is its array,
    and `x.to_array(jnp.float32)` is the plain value. A scale may have axes: a rule that reduces or
    moves an axis first brings its operand to one scale, with `jsa.get_data_and_scale(x)`. A rule
    returns the function's results, with a `ScaledArray` of the same shape and dtype for each
    floating array. A Python float as its scale makes a static scale. A rule should not choose a
    scale by looking at data.

    Args:
        fun: a function of arrays, or pytrees of arrays. Rules get its arguments, with defaults, but
            not the arrays that it closes over. With respect to these arrays, its derivative is the
            plain derivative, without a rule.
        static_argnames: names of arguments that are not arrays (an axis, a flag). Rules get them
            by keyword.
        keeps_plain: for functions of whole trees: rules get plain arrays for arguments without a
            scale, and may return plain arrays.
        result_types: a function of the arguments that returns the results' shapes and dtypes. With
            it, `fun` is traced only where it is needed, and must not close over traced arrays.

    Raises:
        TypeError: if `fun` or a rule is not callable or does not take the arguments. When called,
            if a rule returns a structure, shape or dtype that differs from the function's.

    Source: Balanca et al. 2024, section 3.2.1, whose custom rules are for the forward pass.

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

    def __init__(
        self,
        fun: Callable,
        *,
        static_argnames: Sequence[str] | str = (),
        keeps_plain: bool = False,
        result_types: Callable | None = None,
    ):
        names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
        self.static_argnames = names
        if result_types is not None and not callable(result_types):
            raise TypeError(f"`result_types` must be callable, got {type(result_types).__name__}.")
        self._keeps_plain = keeps_plain
        self._result_types = result_types
        self._rule: Callable | None = None
        self._vjp_rule: Callable | None = None
        if not callable(fun):
            raise TypeError(f"`fun` must be callable, got {type(fun).__name__}.")
        functools.update_wrapper(self, fun, updated=())  # do not copy rules of a `custom_scale`
        self._fun = fun
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._signature = inspect.signature(fun)
        unknown = [n for n in self.static_argnames if n not in self._signature.parameters]
        if unknown:
            raise TypeError(
                f"`static_argnames` of `{self._name}` must be among "
                f"{list(self._signature.parameters)}, got {unknown}."
            )

    def __new__(cls, fun: Callable | None = None, **options: Any) -> Any:
        """Return a decorator if no function is given: `custom_scale(static_argnames=...)`."""
        if fun is None:
            return functools.partial(cls, **options)
        return super().__new__(cls)

    def defscale(self, rule: Callable) -> Callable:
        """Define the scale rule. It takes the function's arguments, with floating arrays scaled."""
        self._rule = self._checked_rule(rule, "defscale", 0)
        return rule

    def defscale_vjp(self, rule: Callable) -> Callable:
        """Define the scale rule of the cotangents. It takes the arguments and the cotangents.

        It returns a tuple, as the backward rule of `jax.custom_vjp` does. For each argument that is
        not static, the tuple has a cotangent of the same structure, shapes and dtypes, or None if
        the argument has no floating leaves. Forward-mode derivatives then raise, as they do with
        `jax.custom_vjp`.
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
        given = set(bound.arguments)
        bound.apply_defaults()
        static = {n: bound.arguments.pop(n) for n in self.static_argnames}
        fun, operands = self._in_order(bound.arguments, static, given)
        leaves, tree = jax.tree.flatten(operands)
        for leaf in leaves:
            if dtypes.leaf_dtype(leaf) is None:
                raise TypeError(
                    f"`{self._name}` takes arrays, got {type(leaf).__name__}; name arguments that "
                    "are not arrays in `static_argnames`."
                )
        operands = jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in leaves])
        if self._rule is None and self._vjp_rule is None:
            return fun(*operands)
        rule = None if self._rule is None else functools.partial(self._rule, **static)
        out = None if self._result_types is None else self._result_types(*operands, **static)
        traced = _traced(self._name, fun, rule, operands, out, keeps_plain=self._keeps_plain)
        if self._vjp_rule is None:
            return _call(*traced)
        return _call_with_vjp(functools.partial(self._vjp_rule, **static), *traced)

    def _in_order(
        self, arguments: dict[str, Any], static: dict[str, Any], given: set[str]
    ) -> tuple[Callable, tuple[Any, ...]]:
        """Return `fun` as a function of its dynamic arguments by position, and these arguments."""
        slots, operands, several = [], [], False
        for name, value in arguments.items():
            kind = self._signature.parameters[name].kind
            keyword = kind is inspect.Parameter.KEYWORD_ONLY and several
            if keyword or kind is inspect.Parameter.VAR_KEYWORD:
                if name in given:
                    raise TypeError(
                        f"`{self._name}` cannot take arrays by `{name}`: rules get arrays by "
                        "position. Name it in `static_argnames`, or make it positional."
                    )
                continue
            several = kind is inspect.Parameter.VAR_POSITIONAL
            operands += value if several else [value]
            slots += [(name, several)] * (len(value) if several else 1)

        def fun(*operands: Any) -> Any:
            full = dict(static)
            for (name, several), x in zip(slots, operands, strict=True):
                full[name] = (*full.get(name, ()), x) if several else x
            bound = inspect.BoundArguments(self._signature, full)  # type: ignore[arg-type]
            return self._fun(*bound.args, **bound.kwargs)

        return fun, tuple(operands)


def _call(jaxpr: Any, applied: AppliedRule, arrays: Sequence[Any]) -> Any:
    """Call a traced function with a rule on flat arguments."""
    out = custom_scale_p.bind(*arrays, jaxpr=jaxpr, applied=applied)
    return jax.tree.unflatten(applied.out_tree, out)


def _traced(
    name: str,
    fun: Callable,
    rule: Callable | None,
    operands: tuple[Any, ...],
    results: Any = None,
    consts: Sequence[Any] = (),
    **options: Any,
) -> tuple[Any, AppliedRule, list[Any]]:
    """Return a function of `(*consts, *operands)` as a jaxpr, its rule, and its flat arguments.

    The arrays that it closes over are its first arguments. If `results` gives the types of its
    results, the function is traced when it is needed.
    """
    arrays, tree = jax.tree.flatten(operands)
    types, result_tree = jax.tree.flatten(results)
    out_tree, count = result_tree, len(consts)

    def flat(*arrays: Any) -> list[Any]:
        nonlocal out_tree
        consts, arrays = arrays[:count], arrays[count:]
        out, out_tree = jax.tree.flatten(fun(*consts, *jax.tree.unflatten(tree, arrays)))
        got, wanted = (_types(out), out_tree), (_types(types), result_tree)
        if results is not None and got != wanted:
            raise TypeError(f"`{name}` returned {got}, but its `result_types` are {wanted}.")
        return out

    arrays = [*consts, *arrays]
    if results is not None and not any(map(_has_special_type, arrays)):
        jaxpr: Any = LazyJaxpr(flat, arrays, types)
    else:
        closed = jax.make_jaxpr(flat)(*arrays)
        jaxpr = _compat.close_jaxpr(_compat.open_jaxpr(closed), ())
        arrays, count = [*closed.consts, *arrays], count + len(closed.consts)
    return jaxpr, AppliedRule(name, rule, tree, out_tree, count, **options), arrays


def _types(arrays: Sequence[Any]) -> list[str]:
    return [f"{x.dtype}{list(x.shape)}" for x in arrays]  # keys have a dtype of their own


def _has_special_type(x: jax.Array) -> bool:
    """Return whether a type has more than shape and dtype. Results would inherit the rest."""
    kind = jax.typeof(x)
    return bool(kind.weak_type or _compat.explicit_sharding(kind) or _compat.varying_axes(kind))


def _call_with_vjp(vjp_rule: Callable, jaxpr: Any, applied: AppliedRule, arrays: list[Any]) -> Any:
    """Call a function as a `custom_vjp` whose backward pass has the scale rule of the cotangents.

    The backward pass computes the plain derivative. With respect to arrays that the function closes
    over, it has no scale rule.
    """
    function = jax.custom_vjp(functools.partial(_call, jaxpr, applied))
    count, tree = applied.num_consts, applied.in_tree
    floating = [i for i, a in enumerate(arrays) if dtypes.is_scalable(a.dtype)]
    moving = [i for i in floating if i < count and _compat.is_traced(arrays[i])]

    def slopes(arrays: Sequence[Any], some: list[int], cotangents: Any) -> dict[int, Any]:
        xs = [arrays[i] for i in some]
        pull = jax.vjp(of_some(as_function(jaxpr), arrays, some), *xs)[1]
        return dict(zip(some, pull(jax.tree.leaves(cotangents)), strict=True))

    def forward(arrays: list[Any]) -> Any:
        return _call(jaxpr, applied, arrays), arrays

    def backward(arrays: list[Any], cotangents: Any) -> tuple[list[Any]]:
        consts, args = arrays[:count], arrays[count:]
        some = [i for i in floating if i >= count]

        def gradients(*operands: Any) -> Any:
            *rest, cotangents = operands
            out = slopes(jax.tree.leaves(rest), some, cotangents)
            return jax.tree.unflatten(tree, [out.get(i + count) for i in range(tree.num_leaves)])

        like = [x if dtypes.is_scalable(x.dtype) else None for x in arrays[count:]]
        types = None if jaxpr.effects else jax.tree.unflatten(tree, like)
        pulled = _traced(
            f"{applied.name}, cotangents",
            gradients,
            vjp_rule,
            (*jax.tree.unflatten(tree, args), cotangents),
            types,
            consts,
            num_cotangents=len(jax.tree.leaves(cotangents)),
        )
        out = slopes(arrays, moving, cotangents) if moving else {}
        out.update(zip(some, jax.tree.leaves(_call(*pulled)), strict=True))
        return ([out.get(i) for i in range(len(arrays))],)

    function.defvjp(forward, backward)
    return function(arrays)
