"""`low_precision`: any optimizer, with its state in few bits between the steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.base import dtypes
from jax_scalify.ops.scaling import match_scales, stop_scaling
from jax_scalify.optim.applying import check_policy, rounded, widen
from jax_scalify.optim.gradients import read_gradients
from jax_scalify.optim.leaves import Kind, Leaf, store_leaf
from jax_scalify.optim.random_bits import count_of
from jax_scalify.optim.scale_choice import GRADIENT_EXPONENTS
from jax_scalify.optim.square_roots import SquareRoot, is_leaf, is_root
from jax_scalify.optim.stacked_update import array_of, stacked_leaves, updated
from jax_scalify.optim.stacking import Item
from jax_scalify.optim.state_leaves import Role, RoleFinder, owners_of
from jax_scalify.optim.stateless import Optimizer
from jax_scalify.optim.storing import read_together, store_leaves

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)


def checked_dtype(dtype: Any, name: str) -> Any:
    """Return `dtype` as a dtype of stored leaves, or raise a `TypeError`."""
    names = [jnp.dtype(d).name for d in _DTYPES]
    given = getattr(dtype, "name", getattr(dtype, "__name__", dtype))
    if given not in names:
        raise TypeError(f"`{name}` must be one of {', '.join(names)}, got {given!r}.")
    return jnp.dtype(given)


def low_precision(
    optimizer: Any,
    dtype: Any = jnp.float16,
    *,
    first_moment_dtype: Any = None,
    second_moment_dtype: Any = None,
    policy: Literal["statistic", "gradient"] = "statistic",
    round_updates: bool = False,
) -> Any:
    """Store the state of an optimizer as `ScaledArray` arrays in few bits; compute in float32.

    An update reads gradients, state and parameters as float32, runs the optimizer's own update, and
    stores each floating leaf of the new state: it chooses a scale and casts once. Scalars and
    leaves that belong to no parameter (counts, hyperparameters, norms) are unchanged. Leaves that
    start from the parameters (copies, averages) keep their dtype. The optimizer works in a plain
    training step, where the state has `ScaledArray` leaves, and inside `scalify`, where parameters
    and gradients have scales too.

    The role of a leaf (a second moment, an accumulated gradient) is found in the optimizer's
    equations. So any optax optimizer works, wrapped or wrapping: `MultiSteps`, `apply_if_finite`,
    `masked`, `inject_hyperparams`, `chain`.

    Policies:

    * "statistic": the RMS of the data becomes 1. For leaves that are never negative (second
      moments), and in FP8, the maximum is brought near the top of the range instead.
    * "gradient": no statistics. A leaf of degree d in the gradient (1 for a first moment, 2 for a
      second moment) has `scale = 2**j * s**d`, where `s` is the scale of its parameter's gradient.
      Other leaves use "statistic". Only inside `scalify`.

    With first and second moments in E4M3 and weights in float16, AdamW takes 4 bytes per parameter.

    Data out of range saturates. Use "gradient" only for moments that are averages of gradients:
    Adagrad's sum of squares would stop growing at the top of the range, and Prodigy multiplies
    gradients by 1e-6 first. Rounding is stochastic, with bits made from the rounded numbers and the
    counts of steps in the state, so an update is still a function of its arguments. If the state
    has no count, as in SGD, a first moment is rounded towards zero where its gradient is 0.

    Args:
        optimizer: an `optax.GradientTransformation`, or an object with `init` and `update`.
        dtype: dtype of the stored leaves: float32, bfloat16, float16 or FP8.
        first_moment_dtype: dtype of leaves of degree 1 that may be negative; by default `dtype`.
        second_moment_dtype: dtype of leaves of degree 2; by default `dtype`. In FP8, leaves that
            are never negative are stored as `SquareRoot` objects, with scales by statistic.
        policy: how scales are chosen.
        round_updates: whether updates lead exactly to numbers of the parameters' dtype, rounded as
            in `apply_updates`. Use it if other code adds the updates: `TrainState.apply_gradients`,
            `nnx.Optimizer.update`. The random bits depend on the counts of steps in the state.

    Returns:
        An optimizer of the same type. `init(params)` makes `ScaledArray` leaves;
        `jsa.tree.shardings` makes their `out_shardings` under `jit`, and `as_scaled_array` does not
        change them. Use `as_scaled_array` to scale the state that a wrapper around this optimizer
        adds. `update` returns updates in float32, inside `scalify` at the parameters' scales: see
        `apply_updates`. Wrappers that compare dtypes (`apply_if_finite`) need float32 gradients.

    Source: a power of second moments in FP8, in groups of 128, is from Xi et al., "COAT", 2024;
    state of 8 bits, in blocks of 2,048, from Dettmers et al., "8-bit Optimizers via Block-wise
    Quantization", 2021.

    Raises:
        TypeError: if `optimizer` is not an optimizer, or if a dtype is not one of these dtypes.
        ValueError: if `policy` is unknown. When called, if "gradient" is used outside `scalify`, if
            `round_updates` gets no parameters, or if trees do not match.

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
    check_policy(policy)
    dtype = checked_dtype(dtype, "dtype")
    first, second = first_moment_dtype, second_moment_dtype
    first = dtype if first is None else checked_dtype(first, "first_moment_dtype")
    second = dtype if second is None else checked_dtype(second, "second_moment_dtype")
    find_roles = RoleFinder(optimizer.init, optimizer.update)
    inner = _LowPrecision(optimizer, find_roles, dtype, first, second, policy, round_updates)

    # Functions, not methods: `copy.deepcopy` of a state then does not copy the optimizer.
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
        optimizer: the optimizer, which computes in float32.
        find_roles: finds the roles of the leaves of its state.
        dtype: dtype of stored leaves other than first and second moments.
        first_moment_dtype: dtype of leaves of degree 1 that may be negative.
        second_moment_dtype: dtype of leaves of degree 2.
        policy: how scales are chosen.
        round_updates: whether updates lead exactly to numbers of the parameters' dtype.
    """

    optimizer: Any
    find_roles: RoleFinder
    dtype: Any
    first_moment_dtype: Any
    second_moment_dtype: Any
    policy: str
    round_updates: bool

    def init(self, params: Any) -> Any:
        wide = widen(params)
        state = widen(self.optimizer.init(wide))
        dtypes_of_moments = {self.first_moment_dtype, self.second_moment_dtype}
        if dtypes_of_moments == {self.dtype} and not dtypes.is_fp8(self.dtype):
            roles = self.find_roles.at_start(state, wide)
        else:
            roles = self.find_roles(wide, state, wide, {})
        leaves, tree = jax.tree.flatten(state)
        weights = jax.tree.leaves(params, is_leaf=is_scaled)
        new = []
        for x, role in zip(leaves, roles, strict=True):
            if not _is_stored(x, role):
                new.append(_kept(x, x))
                continue
            # In a compiled `init`, moments are constants. XLA folds reductions of constants, and
            # takes minutes for a reduction of two operands.
            x = lax.optimization_barrier(x)
            if self._is_root(role):
                new.append(SquareRoot(store_leaf(jnp.sqrt(x), self._like(x, role, weights))))
            else:
                new.append(store_leaf(x, self._like(x, role, weights)))
        return jax.tree.unflatten(tree, new)

    def _is_root(self, role: Role) -> bool:
        """Return whether a leaf is stored as its square root: a second moment in FP8."""
        narrow = dtypes.is_fp8(self.second_moment_dtype)
        return narrow and role.degree == 2 and role.nonneg and not role.is_weight

    def _like(self, x: Any, role: Role, params: list[Any]) -> ScaledArray:
        """Return the form in which a leaf is first stored. Its scale 0 means "no scale yet"."""
        dtype = self.second_moment_dtype if role.degree == 2 else self.dtype
        if role.degree == 1 and not role.nonneg:
            dtype = self.first_moment_dtype
        if role.is_weight and role.param is not None:
            dtype = jnp.result_type(params[role.param].dtype)
        return ScaledArray(jax.ShapeDtypeStruct(x.shape, dtype), jnp.float32(0))

    def update(self, grads: Any, state: Any, params: Any, extra_args: dict[str, Any]) -> Any:
        if self.policy == "gradient" and any(map(is_scaled, _stored_leaves(state))):
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
        # Scales by statistic do not depend on other scales, and a step on plain numbers is shorter.
        plain = self.policy == "statistic"
        if plain:
            grads, (olds, state) = read_gradients(grads), _read_together(state)
        else:
            olds = _stored_leaves(state)
        roots = list(map(is_root, jax.tree.leaves(state, is_leaf=is_leaf)))
        given, weights = grads, params
        types = [_wide_types(tree) for tree in (grads, state, params)]
        owners = owners_of(types[1], types[0] if params is None else types[2])
        call = functools.partial(self.optimizer.update, **extra_args)
        gradients, updates, new, step = updated(call, grads, state, params, owners, plain=plain)
        roles = self.find_roles(types[0], types[1], types[2], extra_args, step)
        updates = jax.tree.map(array_of, updates)
        leaves, tree = jax.tree.flatten(new)
        if self.round_updates:
            updates = rounded(weights, updates, self.policy, _count_factor(map(array_of, leaves)))
        elif plain:
            updates = _scaled_like(updates, given if weights is None else weights)
        few = [i for i, role in enumerate(roles) if _is_stored(leaves[i], role)]
        if not plain:
            gradients = jax.tree.leaves(given)
        each = [(leaves[i], olds[i], roles[i], roots[i]) for i in few]
        count = count_of([array_of(x) for x in leaves if not _shape(x)])
        stored_by_place = dict(zip(few, _store(each, gradients, self.policy, count), strict=True))
        new = [
            stored_by_place[i] if i in stored_by_place else _kept(array_of(x), old)
            for i, (x, old) in enumerate(zip(leaves, olds, strict=True))
        ]
        new = [SquareRoot(x) if root else x for x, root in zip(new, roots, strict=True)]
        return updates, tree.unflatten(new)


def _wide_types(tree: Any) -> Any:
    """Return the shapes and dtypes of the leaves that the inner optimizer gets."""

    def wide(leaf: Any) -> Any:
        leaf = leaf.root if is_root(leaf) else leaf
        kind = leaf.dtype if is_scaled(leaf) else dtypes.leaf_dtype(leaf)
        if kind is None or not dtypes.is_scalable(kind):
            return leaf
        return jax.ShapeDtypeStruct(
            jnp.shape(leaf.data if is_scaled(leaf) else leaf), dtypes.compute_dtype(kind)
        )

    return jax.tree.map(wide, tree, is_leaf=is_leaf)


def _read_together(state: Any) -> tuple[list[Any], Any]:
    """Return the stored leaves of a state, and the state to compute with."""
    leaves, tree = jax.tree.flatten(state, is_leaf=is_leaf)
    olds = _stored_leaves(state)
    which = [i for i, x in enumerate(olds) if hasattr(x, "dtype")]
    found = read_together([olds[i] for i in which])
    for i, old, x in zip(which, *found, strict=True):
        olds[i], leaves[i] = old, SquareRoot(x) if is_root(leaves[i]) else x
    return olds, tree.unflatten(leaves)


def _stored_leaves(state: Any) -> list[Any]:
    """Return the leaves of a state. A `ScaledArray` is one leaf; a `SquareRoot` gives its root."""
    return [x.root if is_root(x) else x for x in jax.tree.leaves(state, is_leaf=is_leaf)]


def _scaled_like(updates: Any, like: Any) -> Any:
    """Return updates at the scales of `like`; outside `scalify`, unchanged."""
    leaves, tree = jax.tree.flatten(updates)
    partners = jax.tree.leaves(like, is_leaf=is_scaled)
    if len(partners) != len(leaves) or any(map(is_scaled, partners)):
        return updates
    return tree.unflatten(map(match_scales, leaves, partners))


def _mismatch(init: Callable[[Any], Any], grads: Any, state: Any, params: Any) -> str | None:
    """Describe where trees do not match; None if they match."""
    found = None if params is None else _first_difference("grads", grads, "params", params)
    if found is None:
        like = jax.eval_shape(init, widen(grads if params is None else params))
        found = _first_difference("state", _without_roots(state), "init(params)", like)
    return found


def _without_roots(state: Any) -> Any:
    """Return a state with the structure that the inner optimizer knows."""
    return jax.tree.map(lambda x: x.root if is_root(x) else x, state, is_leaf=is_leaf)


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
    """Return whether a leaf is stored in few bits: a real array that belongs to a parameter."""
    kind = x.aval.dtype if isinstance(x, Item) else dtypes.leaf_dtype(x)
    floating = kind is not None and jnp.issubdtype(kind, jnp.floating)
    return floating and bool(_shape(x)) and role.param is not None


def _shape(x: Any) -> tuple[int, ...]:
    return x.aval.shape if isinstance(x, Item) else jnp.shape(x)


def _kept(x: Any, old: Any) -> Any:
    """Return a leaf that is not stored in few bits, with the dtype and kind of its old value."""
    if is_scaled(old):
        return store_leaf(x, old)
    kind = dtypes.leaf_dtype(old)
    if kind is None:
        return x
    x = jnp.asarray(x, kind)
    if not dtypes.is_scalable(kind):
        return x
    # `select` makes the result scaled inside `scalify` if `old` is, though it always returns `x`.
    return lax.select(jnp.ones(x.shape, bool), stop_scaling(x), jnp.asarray(old))


def _store(
    leaves: list[tuple[Any, Any, Role, bool]],
    grads: list[Any],
    policy: str,
    count: jax.Array | None,
) -> list[Any]:
    """Store leaves in few bits: as `ScaledArray` arrays, or inside `scalify` as arrays with scales.

    `leaves` are tuples of the new value, the old value, the role, and whether it is a root.
    """
    given, kinds, salts = [], [], []
    for x, old, role, root in leaves:
        follows = policy == "gradient" and role.degree in GRADIENT_EXPONENTS and not root
        degree = int(role.degree) if follows and role.degree and not is_scaled(old) else None
        fades = role.degree == 1 and not role.nonneg
        kinds.append(Kind(role.is_wide, degree, fades, root))
        salts.append(x if role.param is None else grads[role.param])
        given.append(Leaf(x, old, salts[-1]))
    groups = stacked_leaves(given, kinds)
    merged = [_as_stored(leaf, kinds[which[0]]) for which, leaf in groups]
    found = store_leaves(merged, [kinds[which[0]] for which, _ in groups], count)
    new: list[Any] = [None] * len(leaves)
    for (which, leaf), xs in zip(groups, found, strict=True):
        for i, x in zip(which, xs if isinstance(leaf.like, list) else [xs], strict=True):
            new[i] = x
    return new


def _as_stored(leaf: Leaf, kind: Kind) -> Leaf:
    """Return a leaf with the value to store: its square root, if its kind is a root."""
    return leaf._replace(x=jnp.sqrt(leaf.x)) if kind.is_root else leaf


def _count_factor(leaves: Iterable[Any]) -> jax.Array:
    """Return a float32 that changes every step, if the state counts steps."""
    counts = [
        leaf
        for leaf in leaves
        if jnp.ndim(leaf) == 0 and jnp.issubdtype(jnp.result_type(leaf), jnp.integer)
    ]
    total = sum(counts, start=jnp.int32(0))
    return stop_scaling(1 + 2.0**-10 * jnp.asarray(total, jnp.float32))
