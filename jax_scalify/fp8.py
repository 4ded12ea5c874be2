"""FP8 matmuls for unmodified models: `fp8_matmuls`, and predicates that select matmuls."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import is_scaled
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import all_equations, evaluate, scan_operands, while_operands
from jax_scalify.interpreter.tracing import trace
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.nn._patches import Patches, patches_of
from jax_scalify.nn.fp8_dot import DotGeneral
from jax_scalify.passes.recomputing import with_recomputed_activations

__all__ = [
    "Matmul",
    "Predicate",
    "all_of",
    "everything",
    "fp8_matmuls",
    "hidden_layers",
    "linear_layers",
    "min_size",
    "skip",
    "skip_critical",
    "skip_embedding",
    "skip_head",
    "skip_router",
]


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul of the transformed function, the argument of a predicate.

    Attributes:
        scope: names of the modules and functions around it, as `"GPT/block_0/attention/out"`.
            Flax linen and `jax.named_scope` set them; Flax NNX and Equinox do not.
        lhs: shape and dtype of the left operand.
        rhs: shape and dtype of the right operand.
        lhs_name: path of the left operand as an argument, such as `"[0]['head']['kernel']"`, even
            if it was cast or transposed; empty if it was computed.
        rhs_name: the same for the right operand.
        dimension_numbers: as in `jax.lax.dot_general`.
        group_dimensions: dims of the right operand with one matrix for each group of rows, such as
            each expert in `jax.lax.ragged_dot`. Empty for other matmuls.
    """

    scope: str
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct
    lhs_name: str
    rhs_name: str
    dimension_numbers: Any
    group_dimensions: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, int, int]:
        """`(m, n, k)`: the free sizes of the left and the right operand, and the contracted size.

        With groups, `m` or `k`, whichever is divided into groups, counts the rows of all groups.
        """
        contract, batch = self.dimension_numbers
        frees = []
        for x, own in ((self.lhs, 0), (self.rhs, 1)):
            taken = {*contract[own], *batch[own], *(self.group_dimensions if own else ())}
            frees.append(math.prod(n for a, n in enumerate(x.shape) if a not in taken))
        return frees[0], frees[1], math.prod(self.lhs.shape[a] for a in contract[0])


Predicate = Callable[[Matmul], bool]
"""A function that returns whether a matmul becomes FP8."""


def linear_layers(matmul: Matmul) -> bool:
    """Select matmuls without batch dims: not those of attention, but experts of `ragged_dot`."""
    return not matmul.dimension_numbers[1][0]


def everything(matmul: Matmul) -> bool:
    """Select all matmuls, including attention's scores and weighted values."""
    return True


def min_size(size: int) -> Predicate:
    """Return a predicate that selects matmuls whose sizes m, n and k are all at least `size`.

    Example:
        >>> select = jsa.fp8.all_of(jsa.fp8.linear_layers, jsa.fp8.min_size(128))
    """
    return lambda matmul: min(matmul.sizes) >= size


def skip(*patterns: str) -> Predicate:
    """Return a predicate that rejects matmuls whose scope or names match a regular expression.

    Example:
        >>> select = jsa.fp8.all_of(jsa.fp8.linear_layers, jsa.fp8.skip("head", "block_[01]/"))
    """
    compiled = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]

    def predicate(matmul: Matmul) -> bool:
        places = (matmul.scope, matmul.lhs_name, matmul.rhs_name)
        return not any(p.search(place) for p in compiled for place in places)

    return predicate


def all_of(*predicates: Predicate) -> Predicate:
    """Return a predicate that selects matmuls that all predicates select.

    Example:
        >>> select = jsa.fp8.all_of(jsa.fp8.linear_layers, jsa.fp8.skip_head)
        >>> step = jsa.scalify(jax.grad(jsa.fp8_matmuls(lambda w, x: jnp.sum(x @ w), select)))
    """
    return lambda matmul: all(predicate(matmul) for predicate in predicates)


_NO_MODEL = r"(?!\w*(?:model|module|net))"  # "Head" in `GPT2LMHeadModel` must not match

skip_embedding: Predicate = skip(
    rf"embed{_NO_MODEL}|(?<!dis)patch(?:es|ify)?(?:_\d+)?\b|(?<![a-z])w[tp]e(?![a-z])"
)
"""Rejects matmuls with an embedding (of patches, one-hot lookups, and heads tied to it)."""

skip_head: Predicate = skip(
    rf"(?<!multi)(?<!multi[-_])(?:head|logits|embed){_NO_MODEL}", r"\.attend\b"
)
"""Rejects the last layer, whose results become probabilities, but not multi-head attention."""

skip_router: Predicate = skip(rf"(?:router|gating){_NO_MODEL}|moe\w*\W+gate\b")
"""Rejects the layer that chooses the experts of a token, since rounding may change the choice."""

hidden_layers: Predicate = all_of(linear_layers, skip_embedding, skip_head, skip_router)
"""Selects linear layers and experts without embeddings, heads and routers."""

skip_critical: Predicate = skip(
    r"att\w*\W+(?:\w+\W+)?(?:out|o|out_?proj|o_?proj|c_proj|dense|wo)\b",
    r"(?:mlp|ffn|feed_?forward)\w*\W+(?:\w+\W+)?(?:down|down_?proj|c_proj|fc_?2|w_?2|wo|dense_1)\b",
)
"""Rejects the critical matmuls of u-muP (Blake et al. 2024, section 4.2), by their usual names.

Their inputs, the results of attention and of the feed-forward layer's activation, grow in training.
"""


def fp8_matmuls(
    fun: Callable,
    select: Predicate = hidden_layers,
    *,
    forward_dtype: Any = jnp.float8_e4m3fn,
    backward_dtype: Any = jnp.float8_e5m2,
    accumulation_dtype: Any = None,
    recompute: bool = False,
    hadamard: int = 0,
) -> Callable:
    """Transform a forward function so that its matmuls are FP8 matmuls of `jsa.nn`.

    Each `dot_general` becomes `jsa.nn.dot_general`, and each `ragged_dot` `jsa.nn.ragged_dot`. A
    convolution that is a matmul (a kernel of 1 x 1, or patches side by side without padding)
    becomes a matmul. The function may come from any library. Differentiate the result, and the
    backward pass has FP8 matmuls too: `jsa.scalify(jax.grad(jsa.fp8_matmuls(loss)))`. Matmuls
    inside `jit`, `scan`, `while_loop`, `cond` and `jax.checkpoint` are rewritten. Matmuls inside
    `shard_map` or functions with derivative rules (`jax.custom_vjp`), and matmuls of operands that
    are narrow already, are unchanged.

    Args:
        fun: a traceable function of plain arrays. Strings, callables, Python numbers and `None`
            among its arguments are static.
        select: returns whether to rewrite a `jsa.fp8.Matmul`. By default, matmuls without batch
            dims whose names do not match an embedding, a head or a router; see `jsa.fp8`.
        forward_dtype: format of both operands, or a pair: a dtype, or a block format
            (`jsa.BlockFormat` or its name, `"mxfp8"`, `"mxfp4"`, `"nvfp4"`).
        backward_dtype: format of the cotangent, or a pair, as in `jsa.nn.dot_general`.
        accumulation_dtype: dtype of the matmuls' sums. By default the result's if it is bfloat16 or
            float64, bfloat16 for float16 results, and otherwise float32.
        recompute: whether the backward pass recomputes activation functions such as `jax.nn.gelu`
            from their input, as `jax.checkpoint` does, and the FP8 operands made from them. The
            values are the same.
        hadamard: as in `jsa.nn.DotGeneral`.

    Returns:
        A function of the same arguments and results. It has reverse-mode derivatives. Second
        derivatives (of either mode) are computed in the operands' original dtypes.

    Raises:
        TypeError: if `fun` or `select` is not callable, or a format is not floating point. When
            called, if an argument is a `ScaledArray`: put `scalify` around.

    Warns:
        UserWarning: when called, if `fun` contains a backward pass, or if the default `select`
            leaves all of its linear layers wide.

    Example:
        >>> loss = lambda w, x: jnp.sum(x @ w)
        >>> print(jax.grad(jsa.fp8_matmuls(loss))(jnp.ones((1, 1)), jnp.full((1, 1), 1.1)))
        [[1.125]]
    """
    for name, value in (("fun", fun), ("select", select)):
        if not callable(value):
            raise TypeError(f"`{name}` must be callable, got {type(value).__name__}.")
    dot = DotGeneral(
        forward_dtype=forward_dtype,
        backward_dtype=backward_dtype,
        accumulation_dtype=accumulation_dtype,
        hadamard=hadamard,
    )

    @functools.wraps(fun)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        if any(map(is_scaled, jax.tree.leaves((args, kwargs), is_leaf=is_scaled))):
            raise TypeError(
                "`fp8_matmuls` transforms functions of plain arrays, got a ScaledArray. Put "
                "`scalify` around it: `jsa.scalify(jax.grad(jsa.fp8_matmuls(loss)))`."
            )
        traced = trace(fun, args, kwargs)
        names = [jax.tree_util.keystr(path[1:]) for path in traced.paths]
        rewriter = _Rewriter(dot, select, recompute)
        out = rewriter.run(traced.closed, traced.operands, names, "")
        if rewriter.in_backward_pass:
            warnings.warn(
                f"`fp8_matmuls` was given a function with {len(rewriter.in_backward_pass)} matmuls "
                f"of a backward pass, such as `{rewriter.in_backward_pass[0]}`: both operands of "
                "these are rounded to `forward_dtype`. Give it the loss, and differentiate the "
                "result: `jax.grad(jsa.fp8_matmuls(loss))`.",
                stacklevel=2,
            )
        left = [m.rhs_name or m.scope for m, _ in rewriter.seen if linear_layers(m)]
        if select is hidden_layers and left and not any(chosen for _, chosen in rewriter.seen):
            warnings.warn(
                f"`fp8_matmuls` left all {len(left)} linear layers wide, such as `{left[0]}`: "
                "names of embeddings, heads or routers. `select=jsa.fp8.linear_layers` takes them.",
                stacklevel=2,
            )
        return traced.unflatten(out)

    return rewritten


_CONVOLUTION = "conv_general_dilated"
_MATMULS = ("dot_general", "ragged_dot_general", _CONVOLUTION)

# The parameters that hold the jaxprs of a primitive.
_BODIES = {
    "jit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "remat2": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}


def _keeps_name(primitive: str) -> bool:
    """Return whether a primitive's result counts as the same argument as its operand."""
    return (
        traits_of(primitive).elements in ("same", "cast", "moved") or primitive == "dynamic_slice"
    )


@dataclasses.dataclass(frozen=True)
class _Rewriter:
    """An evaluator of jaxprs that replaces selected matmuls."""

    dot: DotGeneral
    select: Predicate
    recompute: bool
    in_backward_pass: list[str] = dataclasses.field(default_factory=list)
    """The scopes of rewritten matmuls that belong to a backward pass."""
    seen: list[tuple[Matmul, bool]] = dataclasses.field(default_factory=list)

    def run(
        self,
        closed: Any,
        args: Sequence[Any],
        names: Sequence[str],
        scope: str,
    ) -> list[Any]:
        """Evaluate a closed jaxpr, given the argument names of its operands."""
        closed = with_recomputed_activations(closed) if self.recompute else closed

        def equation(eqn: Any, pairs: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
            operands, given = [list(each) for each in zip(*pairs)] if pairs else ([], [])
            with _compat.equation_context(eqn):
                out = self._equation(eqn, operands, given, _joined(scope, eqn))
            name = given[0] if _keeps_name(eqn.primitive.name) else ""
            return [(x, name) for x in (out if eqn.primitive.multiple_results else [out])]

        pairs = list(zip(args, names, strict=True))
        out = evaluate(
            closed, pairs, equation, lambda atom: (atom.val, ""), lambda _, const: (const, "")
        )
        return [x for x, _ in out]

    def _equation(self, eqn: Any, operands: list[Any], names: list[str], scope: str) -> Any:
        name, params = eqn.primitive.name, eqn.params
        if name in _MATMULS and self._selects(eqn, names, scope):
            if "transpose(" in scope:
                self.in_backward_pass.append(scope)
            lhs, rhs, *group_sizes = operands
            types = dict(
                precision=params["precision"],
                preferred_element_type=eqn.outvars[0].aval.dtype,
                out_sharding=params.get("out_sharding"),
            )
            if name == "dot_general":
                return self.dot(lhs, rhs, params["dimension_numbers"], **types)
            if (patches := _patches(eqn)) is not None:
                del types["out_sharding"]
                product = self.dot(patches.cut(lhs), rhs, patches.dimension_numbers, **types)
                return patches.arrange(product)
            numbers = params["ragged_dot_dimension_numbers"]
            return self.dot.ragged(lhs, rhs, group_sizes[0], numbers, **types)
        params = eqn.primitive.get_bind_params(params)
        again = name == "remat2"  # recomputes its activations anyway
        inner = dataclasses.replace(self, recompute=self.recompute and not again)
        for key in _BODIES.get(name, ()):
            bodies = params[key]
            several = isinstance(bodies, tuple)
            bodies = [
                inner._body(body, _names_of_body(eqn, key, names), scope)
                for body in (bodies if several else (bodies,))
            ]
            params = {**params, key: tuple(bodies) if several else bodies[0]}
        return eqn.primitive.bind(*operands, **params)

    def _selects(self, eqn: Any, names: list[str], scope: str) -> bool:
        operands = eqn.invars[:2]
        lhs, rhs = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands)
        wide = [jnp.issubdtype(x.dtype, jnp.floating) for x in (lhs, rhs)]
        if not all(wide) or any(dtypes.is_fp8(x.dtype) for x in (lhs, rhs)):
            return False
        ragged = eqn.params.get("ragged_dot_dimension_numbers")
        patches = _patches(eqn)
        if eqn.primitive.name == _CONVOLUTION and patches is None:
            return False
        if patches is not None:
            lhs = jax.ShapeDtypeStruct(patches.shape, lhs.dtype)
            dims = patches.dimension_numbers, ()
        elif ragged is None:
            dims = eqn.params["dimension_numbers"], ()
        else:
            dims = ragged.dot_dimension_numbers, tuple(ragged.rhs_group_dimensions)
        matmul = Matmul(scope, lhs, rhs, names[0], names[1], *dims)
        self.seen.append((matmul, self.select(matmul)))
        return self.seen[-1][1]

    def _body(self, body: Any, names: list[str], scope: str) -> Any:
        """Rewrite an open or closed jaxpr of an equation. Its operands and results are kept."""
        closed = body if hasattr(body, "consts") else _compat.close_jaxpr(body, ())
        if all(e.primitive.name not in _MATMULS for e in all_equations(closed.jaxpr)):
            return body

        def flat(*args: Any) -> list[Any]:
            return self.run(closed, args, names, scope)

        with _compat.no_name_stack():
            new = jax.make_jaxpr(flat)(*closed.in_avals)
        return new if hasattr(body, "consts") else _compat.open_jaxpr(new)


def _patches(eqn: Any) -> Patches | None:
    """Return how a convolution is computed as a matmul; None if it is not one."""
    if eqn.primitive.name != _CONVOLUTION:
        return None
    return patches_of(*(v.aval.shape for v in eqn.invars), **eqn.params)


def _joined(scope: str, eqn: Any) -> str:
    """Return the scope of an equation inside an outer scope."""
    name = str(eqn.source_info.name_stack)
    return "/".join(part for part in (scope, name) if part)


def _names_of_body(eqn: Any, key: str, names: list[str]) -> list[str]:
    """Return the argument names of the operands of an equation's jaxpr; "" for carries."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        return names[1:]
    if name == "scan":
        consts, carry, xs = scan_operands(params, names)
        return [*consts, *[""] * len(carry), *xs]
    if name == "while":
        of_condition, of_body, carry = while_operands(params, names)
        consts = of_condition if key == "cond_jaxpr" else of_body
        return [*consts, *[""] * len(carry)]
    return names
