"""Any optimizer, with its state in few bits between the steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify import tree as tree_lib
from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.base import dtypes
from jax_scalify.ops.scaling import stop_scaling
from jax_scalify.optim.state_leaves import Role, RoleFinder
from jax_scalify.optim.storing import (
    GRADIENT_EXPONENTS,
    bits_of,
    drawn,
    store,
    store_weight,
    stored,
)

_POLICIES = ("statistic", "gradient")
_ROUNDINGS = ("stochastic", "nearest")
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)


class Optimizer(NamedTuple):
    """What is returned for an optimizer that is not a named tuple itself."""

    init: Any
    update: Any


def _checked_dtype(dtype: Any, name: str) -> Any:
    names = [jnp.dtype(d).name for d in _DTYPES]
    given = getattr(dtype, "name", getattr(dtype, "__name__", dtype))
    if given not in names:
        raise TypeError(f"`{name}` must be one of {', '.join(names)}, got {given!r}.")
    return jnp.dtype(given)


def _widen(tree: Any) -> Any:
    """Every floating leaf as a plain array of at least float32."""

    def widen(leaf: Any) -> Any:
        if is_scaled(leaf):
            return leaf.to_array(dtypes.compute_dtype(leaf.dtype))
        kind = dtypes.leaf_dtype(leaf)
        if kind is None or not dtypes.is_scalable(kind):
            return leaf
        return jnp.asarray(leaf, dtypes.compute_dtype(kind))

    return jax.tree.map(widen, tree, is_leaf=is_scaled)


def low_precision(
    optimizer: Any,
    dtype: Any = jnp.float16,
    *,
    first_moment_dtype: Any = None,
    second_moment_dtype: Any = None,
    policy: Literal["statistic", "gradient"] = "statistic",
    round_updates: bool = False,
) -> Any:
    """Store the state of an optimizer as `ScaledArray` in few bits; compute in float32.

    An update reads gradients, state and parameters as float32, runs the optimizer's own update, and
    stores each floating leaf of the new state: it chooses a scale and casts once. Scalars and what
    belongs to no parameter (counts, hyperparameters, norms) stay as they are; what starts from the
    parameters (a copy, an average of them) keeps their dtype. It works in a plain training step,
    where the state's leaves are of type `ScaledArray`, and inside `scalify`, where parameters and
    gradients have scales too.

    What a leaf is, a second moment or an accumulated gradient, is found in the optimizer's own
    equations, so that every optimizer in the form of optax will do, wrapped or wrapping:
    `MultiSteps`, `apply_if_finite`, `masked`, `inject_hyperparams`, `chain`.

    Policies:

    * "statistic": the RMS of the data becomes 1; of leaves that are never negative (second
      moments), and in FP8, the maximum comes near the top of the range.
    * "gradient": no statistics. A leaf that belongs to a parameter, of degree d in the gradient
      (1 for a first moment, 2 for a second one), has `scale = 2**j * s**d` with `s` the scale of
      that parameter's gradient. Other leaves are stored by statistic. Only inside `scalify`.

    Data out of range saturates. "gradient" is for moments that are averages of gradients: the sum
    of squares of Adagrad would stop to grow at the top of the range, and Prodigy multiplies
    gradients by 1e-6 first, so both want "statistic". Rounding is stochastic, by bits that
    are made of the numbers themselves: an update is a function of its arguments, as ever.

    Args:
        optimizer: an `optax.GradientTransformation`, or anything with `init` and `update`.
        dtype: of the stored leaves: float32, bfloat16, float16 or FP8.
        first_moment_dtype: of leaves of degree 1 that may be negative; by default `dtype`.
        second_moment_dtype: of leaves of degree 2 that are never negative; by default `dtype`.
        policy: how scales are chosen.
        round_updates: return updates that end at numbers of the parameters' dtype, rounded as
            `apply_updates` does, so that adding them is exact. For code that adds them by
            itself: `TrainState.apply_gradients`, `nnx.Optimizer.update`. The random bits depend
            on the counts of steps in the state, too.

    Returns:
        An optimizer of the same type. `init(params)` makes `ScaledArray` leaves, which
        `as_scaled_array` leaves as they are; what a wrapper around this one adds to the state is
        for you to scale, by that function. `update` returns updates in float32: see
        `apply_updates`. Wrappers that compare dtypes (`apply_if_finite`) want such gradients too.

    Raises:
        TypeError: if `optimizer` is none, or for another dtype.
        ValueError: for an unknown policy; when called, for "gradient" outside `scalify`, for
            `round_updates` without parameters, and for trees that do not match.

    Example:
        >>> import optax
        >>> opt = jsa.optim.low_precision(optax.adam(1e-3))
        >>> params = jnp.ones(2)
        >>> updates, state = jax.jit(opt.update)(jnp.full(2, 1e-6), opt.init(params), params)
        >>> print(state[0].nu.dtype, f"{state[0].nu.to_array(jnp.float32)[0]:.1e}")
        float16 1.0e-15
    """
    if hasattr(optimizer, "gradient_transformation"):  # optax.MultiSteps
        optimizer = optimizer.gradient_transformation()
    if not (callable(getattr(optimizer, "init", None)) and callable(optimizer.update)):
        raise TypeError(
            "`optimizer` must have `init` and `update`, as an optax.GradientTransformation has, "
            f"got {type(optimizer).__name__}."
        )
    _check_policy(policy)
    dtype = _checked_dtype(dtype, "dtype")
    first, second = first_moment_dtype, second_moment_dtype
    first = dtype if first is None else _checked_dtype(first, "first_moment_dtype")
    second = dtype if second is None else _checked_dtype(second, "second_moment_dtype")
    find_roles = RoleFinder(optimizer.init, optimizer.update)
    inner = _LowPrecision(optimizer, find_roles, dtype, first, second, policy, round_updates)

    # Functions, not methods: `copy.deepcopy` of a state leaves its optimizer the same.
    def init(params: Any) -> Any:
        return inner.init(params)

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return inner.update(grads, state, params, extra_args)

    if not hasattr(optimizer, "_replace"):
        return Optimizer(init, update)
    return optimizer._replace(init=init, update=update)


@dataclasses.dataclass(frozen=True)
class _LowPrecision:
    """An optimizer, and how its state is stored.

    Attributes:
        optimizer: that computes, in float32.
        find_roles: tells what the leaves of its state are.
        dtype: of the stored leaves, unless they are first or second moments.
        first_moment_dtype: of leaves of degree 1 that may be negative.
        second_moment_dtype: of leaves of degree 2.
        policy: how scales are chosen.
        round_updates: whether updates end at numbers of the parameters' dtype.
    """

    optimizer: Any
    find_roles: RoleFinder
    dtype: Any
    first_moment_dtype: Any
    second_moment_dtype: Any
    policy: str
    round_updates: bool

    def init(self, params: Any) -> Any:
        wide = _widen(params)
        state = _widen(self.optimizer.init(wide))
        if {self.first_moment_dtype, self.second_moment_dtype} == {self.dtype}:
            roles = self.find_roles.at_start(state, wide)
        else:
            roles = self.find_roles(wide, state, wide, {})
        leaves, tree = jax.tree.flatten(state)
        weights = jax.tree.leaves(params, is_leaf=is_scaled)
        new = [
            stored(x, self._like(x, role, weights)) if _is_stored(x, role) else _kept(x, x)
            for x, role in zip(leaves, roles, strict=True)
        ]
        return jax.tree.unflatten(tree, new)

    def _like(self, x: Any, role: Role, params: list[Any]) -> ScaledArray:
        """What a leaf is first stored like: nothing is known of its scale."""
        dtype = self.second_moment_dtype if role.degree == 2 else self.dtype
        if role.degree == 1 and not role.nonneg:
            dtype = self.first_moment_dtype
        if role.is_weight and role.param is not None:
            dtype = jnp.result_type(params[role.param].dtype)
        return ScaledArray(jax.ShapeDtypeStruct(x.shape, dtype), jnp.float32(0))

    def update(self, grads: Any, state: Any, params: Any, extra_args: dict[str, Any]) -> Any:
        olds = jax.tree.leaves(state, is_leaf=is_scaled)
        if self.policy == "gradient" and any(map(is_scaled, olds)):
            raise ValueError(
                '`policy="gradient"` needs the scales of the gradients: call `update` inside '
                '`jax_scalify.scalify`, or take `policy="statistic"`.'
            )
        if self.round_updates and params is None:
            raise ValueError(
                "`round_updates` needs the parameters: `update(grads, state, params)`."
            )
        try:
            return self._updated(grads, state, params, extra_args)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = _mismatch(self.optimizer.init, grads, state, params)
            if problem is None:
                raise
            raise ValueError(
                f"{problem}: `update` takes gradients and parameters of the same structure and "
                "shapes, and the state that `init` has made of them."
            ) from error

    def _updated(self, grads: Any, state: Any, params: Any, extra_args: dict[str, Any]) -> Any:
        olds = jax.tree.leaves(state, is_leaf=is_scaled)
        weights = params
        grads, state, params = _widen((grads, state, params))
        roles = self.find_roles(grads, state, params, extra_args)
        updates, new = self.optimizer.update(grads, state, params, **extra_args)
        if self.round_updates:
            each, tree = _weights_and_updates(weights, updates)
            factor = _count_factor(new)
            updates = tree.unflatten(_rounded(*pair, self.policy, factor) for pair in each)
        leaves, tree = jax.tree.flatten(new)
        gradients = jax.tree.leaves(grads)
        new = [
            _store(x, old, role, gradients, self.policy) if _is_stored(x, role) else _kept(x, old)
            for x, old, role in zip(leaves, olds, roles, strict=True)
        ]
        return updates, jax.tree.unflatten(tree, new)


def _mismatch(init: Callable[[Any], Any], grads: Any, state: Any, params: Any) -> str | None:
    """Where two trees do not match; None if they do."""
    found = None if params is None else _first_difference("grads", grads, "params", params)
    if found is None:
        like = jax.eval_shape(init, _widen(grads if params is None else params))
        found = _first_difference("state", state, "init(params)", like)
    return found


def _first_difference(name: str, tree: Any, like_name: str, like: Any) -> str | None:
    shapes = [
        {
            jax.tree_util.keystr(path): jnp.shape(leaf.data if is_scaled(leaf) else leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(t, is_leaf=is_scaled)
        }
        for t in (tree, like)
    ]
    for path in {**shapes[0], **shapes[1]}:
        one, other = (f"of shape {s[path]}" if path in s else "missing" for s in shapes)
        if one != other:
            return f"`{name}{path}` is {one}, `{like_name}{path}` is {other}"
    return None


def _is_stored(x: Any, role: Role) -> bool:
    """Whether a leaf is stored in few bits: a real floating array that belongs to a parameter."""
    kind = dtypes.leaf_dtype(x)
    floating = kind is not None and jnp.issubdtype(kind, jnp.floating)
    return floating and bool(jnp.ndim(x)) and role.param is not None


def _kept(x: Any, old: Any) -> Any:
    """A leaf that is not stored in few bits: of the dtype and kind (plain, scaled) that it had."""
    if is_scaled(old):
        return stored(x, old)
    kind = dtypes.leaf_dtype(old)
    if kind is None:
        return x
    x = jnp.asarray(x, kind)
    if not dtypes.is_scalable(kind):
        return x
    # `scalify` does not see that this is `x` alone: the result is scaled if `old` is.
    return lax.select(jnp.ones(x.shape, bool), stop_scaling(x), jnp.asarray(old))


def _store(x: Any, old: Any, role: Role, grads: list[Any], policy: str) -> Any:
    """A leaf in few bits: outside `scalify` a `ScaledArray`, inside an array that has a scale."""
    grad = x if role.param is None else grads[role.param]
    if is_scaled(old):
        bits = bits_of(x, grad if grad.shape == x.shape else x)
        return stored(x, old, wide=role.is_wide, bits=bits)
    follows = policy == "gradient" and role.degree in GRADIENT_EXPONENTS
    degree = int(role.degree) if follows and role.degree is not None else None
    return store(x, old, grad, wide=role.is_wide, degree=degree)


def apply_updates(
    params: Any,
    updates: Any,
    *,
    key: Any = None,
    policy: Literal["statistic", "gradient"] = "statistic",
    rounding: Literal["stochastic", "nearest"] = "stochastic",
) -> Any:
    """Add updates to parameters in float32; round once to the parameters' own dtype.

    Parameters in float16 are the master weights then: no copy in float32 is kept.

    Args:
        params: arrays, or outside `scalify` also of type `ScaledArray`.
        updates: of the same structure.
        key: of `jax.random`, for stochastic rounding. By default the random bits are made of the
            numbers themselves: a step repeats exactly. But where a parameter and its update are the
            same at every step, so is the rounding: with the same batch again and again, and
            updates that are small against the spacing of the dtype, training stalls. Give a key
            there, `jax.random.fold_in(key, step)`.
        policy: how the scales of parameters are chosen, static ones apart: "statistic", RMS 1, or
            lower where an element would leave the range; "gradient", without statistics inside
            `scalify`: the larger scale of parameter and update. It never sinks: an optimizer that
            divides by almost nothing makes updates of an immense scale, and the parameters vanish.
        rounding: "stochastic", so that updates smaller than the spacing of the parameters' dtype
            count on average; to "nearest" they are lost, weight decay first of all.

    Raises:
        ValueError: for an unknown policy or rounding, or updates of another structure or shape.

    Example:
        >>> params = {"w": jnp.ones(1000, jnp.float16)}
        >>> updates = {"w": jnp.full(1000, 1e-4)}
        >>> new = jsa.optim.apply_updates(params, updates, key=jax.random.key(0))
        >>> print(jnp.unique(new["w"]), new["w"].dtype)
        [1.    1.001] float16
    """
    _check_policy(policy)
    if rounding not in _ROUNDINGS:
        raise ValueError(f"`rounding` must be one of {list(_ROUNDINGS)}, got {rounding!r}.")
    each, tree = _weights_and_updates(params, updates)
    keys = [None] * len(each) if key is None else jax.random.split(key, len(each))
    nearest = rounding == "nearest"
    return tree.unflatten(
        _applied(*pair, key, policy, nearest) for pair, key in zip(each, keys, strict=True)
    )


def _weights_and_updates(params: Any, updates: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The leaves of both trees, in pairs, and their structure."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_scaled)
    steps = tree_lib.flatten_like(tree, updates, "updates", "params")
    return list(zip(leaves, steps, strict=True)), tree


def _check_policy(policy: str) -> None:
    if policy not in _POLICIES:
        raise ValueError(f"`policy` must be one of {list(_POLICIES)}, got {policy!r}.")


def _count_factor(state: Any) -> jax.Array:
    """A number that is another one at each step, if the state counts the steps."""
    counts = [
        leaf
        for leaf in jax.tree.leaves(state)
        if jnp.ndim(leaf) == 0 and jnp.issubdtype(jnp.result_type(leaf), jnp.integer)
    ]
    total = sum(counts, start=jnp.int32(0))
    return stop_scaling(1 + 2.0**-10 * jnp.asarray(total, jnp.float32))


def _rounded(param: Any, update: Any, policy: str, factor: jax.Array) -> Any:
    """The update from a parameter to the number of its dtype where `_applied` would end."""
    kind = param.dtype if is_scaled(param) else dtypes.leaf_dtype(param)
    is_float = kind is not None and dtypes.is_scalable(kind)
    if update is None or not is_float or dtypes.compute_dtype(kind) == kind:
        return update
    new = _applied(param, update, None, policy, False, salt=_widen(update) * factor)
    return _widen(new) - _widen(param)


def _applied(
    param: Any, update: Any, key: Any, policy: str, nearest: bool, salt: Any = None
) -> Any:
    if update is None:
        return param
    param = param if is_scaled(param) else jnp.asarray(param)
    shape = jnp.shape(update)
    if shape != param.shape:
        raise ValueError(
            f"`updates` must have the shapes of `params`, got {shape} for {param.shape}."
        )
    update = _widen(update)
    total = _widen(param) + update
    if nearest or key is not None:
        salt = None
    elif salt is None:
        salt = update
    bits = None if nearest or key is None else dtypes.random_bits(key, total.shape)
    if is_scaled(param):
        return stored(total, param, bits=drawn(total, bits, salt))
    by_statistic = policy == "statistic"
    return store_weight(total, param, bits, salt, by_statistic=by_statistic)
