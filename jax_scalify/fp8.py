"""FP8 matmuls for models that know nothing of them."""

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
    """A matmul of the function that is rewritten: what a predicate decides by.

    Attributes:
        scope: names of the modules and functions around it, as `"GPT/block_0/attention/out"`.
            Flax linen and `jax.named_scope` give them; Flax NNX and Equinox do not.
        lhs: shape and dtype of the left operand.
        rhs: shape and dtype of the right operand.
        lhs_name: path of the argument that the left operand is, as `"[0]['head']['kernel']"`, up to
            its dtype and layout; empty if it was computed.
        rhs_name: likewise.
        dimension_numbers: as in `jax.lax.dot_general`.
        group_dimensions: the right operand's dims that hold a matrix for each group of rows, as
            for each expert in `jax.lax.ragged_dot`; empty of any other.
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
        """`(m, n, k)`: the left and the right operand's free and the contracted size.

        Of groups, `m` (or `k`, if that is what is divided) is the number of all rows together.
        """
        contract, batch = self.dimension_numbers
        frees = []
        for x, own in ((self.lhs, 0), (self.rhs, 1)):
            taken = {*contract[own], *batch[own], *(self.group_dimensions if own else ())}
            frees.append(math.prod(n for a, n in enumerate(x.shape) if a not in taken))
        return frees[0], frees[1], math.prod(self.lhs.shape[a] for a in contract[0])


Predicate = Callable[[Matmul], bool]
"""Tells of a matmul whether it becomes FP8."""


def linear_layers(matmul: Matmul) -> bool:
    """Those without batch dims: no attention scores and values, but experts of `ragged_dot`."""
    return not matmul.dimension_numbers[1][0]


def everything(matmul: Matmul) -> bool:
    """All of them, attention's scores and weighted values too."""
    return True


def min_size(size: int) -> Predicate:
    """Make the predicate of matmuls all of whose sizes m, n, k are at least `size`.

    Example:
        >>> select = jsa.fp8.all_of(jsa.fp8.linear_layers, jsa.fp8.min_size(128))
    """
    return lambda matmul: min(matmul.sizes) >= size


def skip(*patterns: str) -> Predicate:
    """Make the predicate of matmuls in whose scope and names no regular expression is found.

    Example:
        >>> select = jsa.fp8.all_of(jsa.fp8.linear_layers, jsa.fp8.skip("head", "block_[01]/"))
    """
    compiled = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]

    def predicate(matmul: Matmul) -> bool:
        places = (matmul.scope, matmul.lhs_name, matmul.rhs_name)
        return not any(p.search(place) for p in compiled for place in places)

    return predicate


def all_of(*predicates: Predicate) -> Predicate:
    """Make the predicate of matmuls that satisfy all predicates.

    Example:
        >>> select = jsa.fp8.all_of(jsa.fp8.linear_layers, jsa.fp8.skip_head)
        >>> step = jsa.scalify(jax.grad(jsa.fp8_matmuls(lambda w, x: jnp.sum(x @ w), select)))
    """
    return lambda matmul: all(predicate(matmul) for predicate in predicates)


_NO_MODEL = r"(?!\w*(?:model|module|net))"  # every layer is in a `GPT2LMHeadModel`

skip_embedding: Predicate = skip(
    rf"embed{_NO_MODEL}|(?<!dis)patch(?:es|ify)?(?:_\d+)?\b|(?<![a-z])w[tp]e(?![a-z])"
)
"""No matmul with an embedding, be it of patches, a one-hot lookup or a head that is tied to it."""

skip_head: Predicate = skip(
    rf"(?<!multi)(?<!multi[-_])(?:head|logits|embed){_NO_MODEL}", r"\.attend\b"
)
"""Not the last layer, whose results become probabilities; a multi-head attention is none."""

skip_router: Predicate = skip(rf"(?:router|gating){_NO_MODEL}|moe\w*\W+gate\b")
"""Not the layer that chooses the experts of a token, since rounding changes the choice."""

hidden_layers: Predicate = all_of(linear_layers, skip_embedding, skip_head, skip_router)
"""Linear layers and experts but embeddings, heads and routers, half of what FP8 costs in loss."""

skip_critical: Predicate = skip(
    r"att\w*\W+(?:\w+\W+)?(?:out|o|out_?proj|o_?proj|c_proj|dense|wo)\b",
    r"(?:mlp|ffn|feed_?forward)\w*\W+(?:\w+\W+)?(?:down|down_?proj|c_proj|fc_?2|w_?2|wo|dense_1)\b",
)
"""Not u-muP's critical matmuls (Blake et al. 2024, section 4.2), by the names that are usual.

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
    """Transform a forward function so that its matmuls are those of `jsa.nn`.

    Each `dot_general` becomes `jsa.nn.dot_general`, each `ragged_dot`, as experts have, becomes
    `jsa.nn.ragged_dot`, and a convolution that is a matmul, with a kernel of 1 x 1 or of
    patches side by side and no padding, becomes one. The function is an ordinary one, of any
    library; differentiate the result: `jsa.scalify(jax.grad(jsa.fp8_matmuls(loss)))`. The
    backward pass has FP8 matmuls too. Matmuls inside `jit`, `scan`, `while_loop`, `cond` and
    `jax.checkpoint` are found; those inside `shard_map` or a function with derivative rules of
    its own (`jax.custom_vjp`), and those of operands that are narrow already, stay as they are.

    Args:
        fun: a traceable function of plain arrays; strings, callables, Python bools and `None`
            among its arguments are static.
        select: tells of a `jsa.fp8.Matmul` whether to rewrite it; by default those without batch
            dims that no name calls an embedding, a head or a router; more are in `jsa.fp8`.
        forward_dtype: format of both operands, or a pair with one for each: a dtype, or a block
            format (`jsa.BlockFormat` or its name, `"mxfp8"`, `"mxfp4"`, `"nvfp4"`).
        backward_dtype: format of the cotangent, or a pair, as of `jsa.nn.dot_general`.
        accumulation_dtype: dtype in which the matmuls give their sums; by default that of results
            in bfloat16 or float64, bfloat16 for results in float16, else float32.
        recompute: whether the backward pass computes activation functions again, such as
            `jax.nn.gelu` and `silu`, from their input, as `jax.checkpoint` does, and the FP8
            operand of the matmul that takes their result. The values are the same.
        hadamard: as of `jsa.nn.DotGeneral`.

    Returns:
        A function of the same arguments and results. Its derivatives are of reverse mode; second
        ones (of either mode) are computed in the dtypes that the operands had.

    Raises:
        TypeError: if `fun` or `select` is not callable, or a format not floating point; when
            called, for a `ScaledArray`: `scalify` goes around.

    Warns:
        UserWarning: when called, if `fun` has a backward pass in it, or if by default all of its
            linear layers are left wide.

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
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "checkpoint": ("jaxpr",),
    "remat2": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}


def _keeps_name(primitive: str) -> bool:
    """Whether an operand that is an argument is still one afterwards."""
    return (
        traits_of(primitive).elements in ("same", "cast", "moved") or primitive == "dynamic_slice"
    )


@dataclasses.dataclass(frozen=True)
class _Rewriter:
    """Evaluates a jaxpr with some of its matmuls replaced."""

    dot: DotGeneral
    select: Predicate
    recompute: bool
    in_backward_pass: list[str] = dataclasses.field(default_factory=list)
    """Scopes of what was rewritten, but has been differentiated already."""
    seen: list[tuple[Matmul, bool]] = dataclasses.field(default_factory=list)

    def run(
        self,
        closed: Any,
        args: Sequence[Any],
        names: Sequence[str],
        scope: str,
    ) -> list[Any]:
        """Evaluate a closed jaxpr, given the names of the arguments that its operands are."""
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
        again = name in ("checkpoint", "remat2")  # all of it is computed again
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
        if not all(wide) or any(dtypes.is_narrow_float(x.dtype) for x in (lhs, rhs)):
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
        """Rewrite a jaxpr of an equation, closed or not, which keeps its operands and results."""
        closed = body if hasattr(body, "consts") else _compat.close_jaxpr(body, ())
        if all(e.primitive.name not in _MATMULS for e in all_equations(closed.jaxpr)):
            return body

        def flat(*args: Any) -> list[Any]:
            return self.run(closed, args, names, scope)

        with _compat.no_name_stack():
            new = jax.make_jaxpr(flat)(*closed.in_avals)
        return new if hasattr(body, "consts") else _compat.open_jaxpr(new)


def _patches(eqn: Any) -> Patches | None:
    """How a convolution is a matmul; None of another and of other equations."""
    if eqn.primitive.name != _CONVOLUTION:
        return None
    return patches_of(*(v.aval.shape for v in eqn.invars), **eqn.params)


def _joined(scope: str, eqn: Any) -> str:
    """The scope of an equation inside another."""
    name = str(eqn.source_info.name_stack)
    return "/".join(part for part in (scope, name) if part)


def _names_of_body(eqn: Any, key: str, names: list[str]) -> list[str]:
    """Which arguments the operands of an equation's jaxpr are; a carry is none."""
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
