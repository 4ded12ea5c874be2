"""Trace a user's function of pytrees to a jaxpr."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays.scaled_array import is_scaled
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import replaced
from jax_scalify.blocks.array import is_array_of_ours, is_block_scaled
from jax_scalify.conversions.nnx_objects import pure_call
from jax_scalify.passes.widening import cast_late, wider_dtype

_CLOSED_OVER = (
    "jax_scalify: inside a transformed function every value is a plain array. Pass a ScaledArray "
    "that `fun` closes over as an argument, or convert it with `jsa.asarray`."
)
# Error messages of Python, JAX and this package that report an unexpected ScaledArray. Other
# messages contain the word because they list what is allowed.
_FOUND = re.compile("ScaledArray['(]|got ScaledArray|A ScaledArray has")


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function.

    Attributes:
        closed: the closed jaxpr, on plain arrays.
        operands: the arrays and `ScaledArray`s among the arguments, in the order of the jaxpr.
        paths: the key paths of the operands in `(args, kwargs)`.
        out_tree: the structure of the results.
        static_results: the results that are not arrays, by position: strings, callables, Python
            ints, numbers among the arguments and tangents of integers (`float0`).
        finish: writes results into mutable arguments (NNX modules) and returns the other results.
    """

    closed: Any
    operands: list[Any]
    paths: list[Any]
    out_tree: Any
    static_results: dict[int, Any]
    finish: Callable[[Any], Any]

    def unflatten(self, arrays: Iterable[Any]) -> Any:
        """Return the results of the function, given the results of the jaxpr.

        The other leaves are static, and were known when the function was traced.
        """
        rest = iter(arrays)
        leaves = [
            self.static_results[i] if i in self.static_results else next(rest)
            for i in range(self.out_tree.num_leaves)
        ]
        return self.finish(jax.tree.unflatten(self.out_tree, leaves))


def trace(fun: Callable, args: Any, kwargs: Any, *, takes_blocks: bool = False) -> Traced:
    """Trace a function. Strings, callables, Python numbers and `None` among arguments are static.

    An int may be a shape or an exponent, a float a dropout rate or the initial value of a pooling.
    A number that should be traced is an array already, because `jax.jit` makes arrays of numbers.
    Among the results, strings, callables, Python ints, tangents of integers and such numbers of the
    arguments, as in an Equinox model, are static too. If `takes_blocks`, a `BlockScaledArray`
    argument is converted to a `ScaledArray`.

    Raises:
        TypeError: if `fun` uses or returns a `ScaledArray` that is not an argument.
    """
    call = pure_call(fun, args, kwargs)
    is_leaf = is_array_of_ours if takes_blocks else is_scaled
    paths, tree = jax.tree.flatten_with_path((call.args, call.kwargs), is_leaf=is_leaf)
    leaves = [leaf.to_scaled_array() if is_block_scaled(leaf) else leaf for _, leaf in paths]
    dynamic = [i for i, leaf in enumerate(leaves) if is_operand(leaf)]
    numbers = [leaf for leaf in leaves if dtypes.is_python_number(leaf)]
    out_tree: Any = None
    static_results: dict[int, Any] = {}
    # The dtypes to which FP8 arguments are cast. It is empty in the first trace of `flat`. If JAX
    # refuses to promote FP8 there, the arguments are wider in a second trace.
    wider: dict[int, Any] = {}

    def flat(args: Any, kwargs: Any) -> list[Any]:
        nonlocal out_tree
        given = tree.flatten_up_to((args, kwargs))
        full = replaced(leaves, dynamic, [given[i] for i in dynamic])
        narrow = {i: full[i] for i in wider}
        for i, dtype in wider.items():
            full[i] = lax.convert_element_type(full[i], dtype)
        in_args, in_kwargs = jax.tree.unflatten(tree, full)
        try:
            out, out_tree = jax.tree.flatten(call.fun(*in_args, **in_kwargs), is_leaf=is_scaled)
        except TypeError as error:
            if _FOUND.search(str(error)):
                error.add_note(_CLOSED_OVER)
            raise
        if any(map(is_scaled, out)):
            raise TypeError(f"`fun` returned a ScaledArray. {_CLOSED_OVER}")
        # Zero tangents of integers are static results, so they must not be tracers.
        out = [np.zeros(x.shape, jax.dtypes.float0) if _is_float0(x) else x for x in out]
        # An FP8 argument that is returned unchanged stays FP8.
        out = [next((narrow[i] for i in wider if x is full[i]), x) for x in out]
        static_results.clear()
        static_results.update(
            (i, leaf)
            for i, leaf in enumerate(out)
            if is_static_result(leaf)
            or isinstance(leaf, int)
            or _is_float0(leaf)
            or any(leaf is each for each in numbers)
        )
        return [leaf for i, leaf in enumerate(out) if i not in static_results]

    # JAX's errors then name the user's function and line, and arguments as `args[0]['w']`.
    signature = inspect.signature(flat)
    functools.update_wrapper(flat, fun)
    flat.__signature__ = signature  # type: ignore[attr-defined]
    operands = [leaves[i] for i in dynamic]
    arrays = [x.data if is_scaled(x) else x for x in operands]
    given = jax.tree.unflatten(tree, replaced([None] * len(leaves), dynamic, arrays))
    try:
        closed = jax.make_jaxpr(flat)(*given)
    except jax.dtypes.TypePromotionError:  # JAX does not promote FP8: see `passes/widening.py`
        wider.update(_wider_dtypes(leaves, dynamic))
        if not wider:
            raise
        closed = cast_late(jax.make_jaxpr(flat)(*given), [dynamic.index(i) for i in wider])
    paths = [paths[i][0] for i in dynamic]
    return Traced(closed, operands, paths, out_tree, static_results, call.finish)


def argument_name(path: tuple) -> str:
    """Return the key path of an argument as code: `args[0].params['w']`."""
    root = ("args", "kwargs")[path[0].idx]
    return root + jax.tree_util.keystr(path[1:])


def _wider_dtypes(leaves: list[Any], dynamic: list[int]) -> dict[int, Any]:
    """Return the dtypes to which FP8 leaves are promoted, if any leaf is scaled."""
    if not any(map(is_scaled, leaves)):
        return {}
    found = {i: jnp.dtype(getattr(leaves[i], "dtype", np.int32)) for i in dynamic}
    narrow = [i for i, dtype in found.items() if dtypes.is_fp8(dtype)]
    return {i: wider_dtype(found[i], found.values()) for i in narrow}


def is_operand(leaf: Any) -> bool:
    """Return whether an argument is an array. A Python number is static."""
    is_array = dtypes.leaf_dtype(leaf) is not None and not dtypes.is_python_number(leaf)
    return is_array or is_scaled(leaf)


def _is_float0(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def is_static_result(leaf: Any) -> bool:
    """Return whether a result of a function is a string or a callable, not an array."""
    if isinstance(leaf, str):
        return True
    return callable(leaf) and dtypes.leaf_dtype(leaf) is None and not hasattr(leaf, "__jax_array__")
