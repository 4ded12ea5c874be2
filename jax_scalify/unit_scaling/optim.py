"""Optimizers of u-µP: the learning rate of each parameter goes by its role.

Needs optax: `from jax_scalify.unit_scaling import optim`. One learning rate serves all widths and
depths; updates are multiplied by a factor of their parameter's role::

    role         Adam, SGD    SGD, readout constrained
    weight       1/√fan_in    1
    output       1            1
    bias, norm   1            √features
    embedding    1/√width     1

and, inside of a residual stack, by 1/√depth, for `depth` layers of the stack. SGD differs from Adam
in that the scale of a gradient is that of its update: with the constraint "to_output_scale" the
gradients that leave the readout are smaller, as 1/√width, and the last column makes up for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

try:
    import optax
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "`jax_scalify.unit_scaling.optim` needs optax: `pip install optax`."
    ) from error

try:
    from flax import serialization as _serialization
except ImportError:
    _serialization = None

from jax_scalify.unit_scaling.roles import Role, get_roles

__all__ = [
    "ScaleByRoleState",
    "adam",
    "adam_factor",
    "adamw",
    "add_independent_weight_decay",
    "scale_by_role",
    "sgd",
    "sgd_factor",
]

RoleFactor = Callable[[Role], float]


def adam_factor(role: Role) -> float:
    """Return what u-µP multiplies an update of Adam by.

    Args:
        role: with a `fan_in`, as `get_roles` returns it.

    Source: Blake et al., *u-µP* (2024), table 2.

    Examples:
        >>> from jax_scalify.unit_scaling import Role, optim
        >>> optim.adam_factor(Role("weight", fan_in=16, depth=4))
        0.125
    """
    return _base_factor(role) * _depth_factor(role)


def sgd_factor(role: Role, readout_constraint: str | None = None) -> float:
    """Return what u-µP multiplies an update of SGD by.

    Args:
        role: with a `fan_in`, as `get_roles` returns it.
        readout_constraint: that of `linear_readout`: None or "to_output_scale".

    Raises:
        ValueError: if the constraint is another.

    Examples:
        >>> from jax_scalify.unit_scaling import Role, optim
        >>> optim.sgd_factor(Role("bias", fan_in=16, depth=4), "to_output_scale")
        2.0
    """
    if readout_constraint not in (None, "to_output_scale"):
        raise ValueError(
            "`readout_constraint` of `sgd` must be None or 'to_output_scale', got "
            f"{readout_constraint!r}."
        )
    factor = adam_factor(role)
    if readout_constraint is not None and role.name != "output":
        factor *= math.sqrt(_fan_in(role))
    return factor


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ScaleByRoleState:
    """The factors, one for each parameter: static, no arrays."""

    factors: tuple[float, ...]


if _serialization is not None:  # a state with no arrays has nothing to store
    _serialization.register_serialization_state(
        ScaleByRoleState, lambda state: {}, lambda state, stored: state
    )


def scale_by_role(
    factor: RoleFactor = adam_factor, roles: Any = None
) -> optax.GradientTransformation:
    """Multiply updates by a factor that depends on their parameter's role.

    It belongs behind what normalises gradients, such as `optax.scale_by_adam`.

    Args:
        factor: of a role; by default that of Adam in u-µP.
        roles: None to take the roles that the parameters carry, or as in `get_roles`.

    Returns:
        A transformation whose state has no arrays.

    Raises:
        ValueError: from `init`, if a parameter has no role; from `update`, if the updates are not
            those of the parameters.

    Examples:
        >>> import optax
        >>> from jax_scalify.unit_scaling import optim
        >>> params = {"kernel": jnp.ones((16, 1))}
        >>> tx = optax.chain(optim.scale_by_role(roles=lambda path: "weight"), optax.scale(-0.5))
        >>> print(tx.update({"kernel": jnp.ones((1, 1))}, tx.init(params))[0]["kernel"])
        [[-0.125]]
    """

    def init(params: Any) -> Any:
        found = jax.tree.leaves(get_roles(params, roles), is_leaf=lambda x: isinstance(x, Role))
        return ScaleByRoleState(tuple(map(factor, found)))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        leaves, structure = jax.tree.flatten(updates)
        if len(leaves) != len(state.factors):
            raise ValueError(
                f"`scale_by_role` has seen {len(state.factors)} parameters and got {len(leaves)} "
                "updates: `init` and `update` must be given the same tree."
            )
        scaled = [u if f == 1 else u * f for u, f in zip(leaves, state.factors, strict=True)]
        return jax.tree.unflatten(structure, scaled), state

    return optax.GradientTransformation(init, update)


def add_independent_weight_decay(
    weight_decay: float,
    schedule: optax.Schedule | None = None,
    mask: Any = None,
) -> optax.GradientTransformation:
    """Take `weight_decay * schedule(step) * params` from the updates.

    It belongs at the end of a chain, behind the learning rate: neither that nor the factors of
    roles then change how fast weights decay.

    Args:
        weight_decay: share of a parameter that is taken in a step.
        schedule: of the step, from 0 on: a factor, 1 by default.
        mask: as in `optax.masked`: which parameters decay, by default all.

    Returns:
        A transformation.

    Source: Wortsman et al., *Small-scale proxies for large-scale Transformer training
    instabilities* (2023); Blake et al., *u-µP* (2024), section 3.

    Examples:
        >>> from jax_scalify.unit_scaling import optim
        >>> tx = optim.add_independent_weight_decay(0.25)
        >>> print(tx.update(jnp.zeros(1), tx.init(jnp.ones(1)), jnp.ones(1))[0])
        [-0.25]
    """

    def init(params: Any) -> Any:
        del params
        return optax.ScaleByScheduleState(count=jnp.zeros([], jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        if params is None:
            raise ValueError(
                "`add_independent_weight_decay` needs the parameters: call "
                "`update(updates, state, params)`."
            )
        decay = weight_decay if schedule is None else weight_decay * schedule(state.count)
        updates = jax.tree.map(lambda u, p: u - jnp.asarray(decay, u.dtype) * p, updates, params)
        return updates, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    decay = optax.GradientTransformation(init, update)
    return decay if mask is None else optax.masked(decay, mask)


def adam(
    learning_rate: float | optax.Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    roles: Any = None,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Make Adam with the learning rates of u-µP.

    Args:
        learning_rate: of all widths and depths, or a schedule.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        mu_dtype: of the first moment, by default that of the parameters.
        roles: None to take the roles that the parameters carry, or as in `get_roles`.

    Returns:
        An optimizer in the form of optax.

    Source: Blake et al., *u-µP* (2024), table 2.

    Examples:
        >>> from jax_scalify.unit_scaling import optim
        >>> tx = optim.adam(0.5, roles=lambda path: "weight")
        >>> params = jnp.ones((16, 1))
        >>> print(tx.update(params, tx.init(params))[0][0].round(3))
        [-0.125]
    """
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype),
        scale_by_role(adam_factor, roles),
        optax.scale_by_learning_rate(learning_rate),
    )


def adamw(
    learning_rate: float | optax.Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    weight_decay: float = 1e-4,
    peak_learning_rate: float | None = None,
    mask: Any = None,
    roles: Any = None,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Make Adam with the learning rates of u-µP and independent weight decay.

    A step is, with lr the learning rate and f the factor of the parameter's role,

        w -= lr * f * adam(gradient) + weight_decay * lr / peak_learning_rate * w

    where the last quotient is 1 if the learning rate is a number. So weights decay by
    `weight_decay` at the peak of a schedule, whatever the peak is and whatever their role, and
    follow the shape of the schedule. `optax.adamw`'s decay is lr times its `weight_decay`.

    Args:
        learning_rate: of all widths and depths, or a schedule.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        mu_dtype: of the first moment, by default that of the parameters.
        weight_decay: share of a parameter that is taken in a step.
        peak_learning_rate: largest value of a schedule; needed with one.
        mask: as in `optax.masked`: which parameters decay, by default all.
        roles: None to take the roles that the parameters carry, or as in `get_roles`.

    Returns:
        An optimizer in the form of optax.

    Raises:
        ValueError: if a schedule has no peak, or a number has one.

    Source: Blake et al., *u-µP* (2024), section 3 and table 2.

    Examples:
        >>> from jax_scalify.unit_scaling import optim
        >>> tx = optim.adamw(0.5, weight_decay=0.25, roles=lambda path: "weight")
        >>> params = jnp.ones((16, 1))
        >>> print(tx.update(params, tx.init(params), params)[0][0].round(4))
        [-0.375]
    """
    schedule = None
    if callable(learning_rate):
        if peak_learning_rate is None or not peak_learning_rate > 0:
            raise ValueError(
                "`adamw` with a schedule needs its largest value, by which weight decay is "
                f"independent of it: `peak_learning_rate` must be positive, got "
                f"{peak_learning_rate}."
            )
        schedule = _relative(learning_rate, peak_learning_rate)
    elif peak_learning_rate is not None:
        raise ValueError("`peak_learning_rate` of `adamw` is for a schedule as `learning_rate`.")
    return optax.chain(
        adam(learning_rate, b1, b2, eps, roles=roles, mu_dtype=mu_dtype),
        add_independent_weight_decay(weight_decay, schedule, mask),
    )


def sgd(
    learning_rate: float | optax.Schedule,
    momentum: float | None = None,
    nesterov: bool = False,
    *,
    readout_constraint: str | None = None,
    roles: Any = None,
) -> optax.GradientTransformation:
    """Make SGD with the learning rates of u-µP.

    Args:
        learning_rate: of all widths and depths, or a schedule.
        momentum: decay of the sum of gradients, or None for no sum.
        nesterov: whether momentum is Nesterov's.
        readout_constraint: that of `linear_readout`: None, as in the modules here, or
            "to_output_scale".
        roles: None to take the roles that the parameters carry, or as in `get_roles`.

    Returns:
        An optimizer in the form of optax.

    Raises:
        ValueError: if the constraint is another.

    Examples:
        >>> from jax_scalify.unit_scaling import optim
        >>> tx = optim.sgd(0.5, roles=lambda path: "weight")
        >>> params = jnp.ones((16, 1))
        >>> print(tx.update(params, tx.init(params))[0][0])
        [-0.125]
    """
    sgd_factor(Role("bias", fan_in=1), readout_constraint)
    steps = [
        scale_by_role(lambda role: sgd_factor(role, readout_constraint), roles),
        optax.scale_by_learning_rate(learning_rate),
    ]
    if momentum is not None:
        steps.insert(0, optax.trace(decay=momentum, nesterov=nesterov))
    return optax.chain(*steps)


def _relative(schedule: optax.Schedule, peak: float) -> optax.Schedule:
    return lambda step: schedule(step) / peak


def _base_factor(role: Role) -> float:
    if role.name in ("weight", "embedding"):
        return 1 / math.sqrt(_fan_in(role))
    return 1.0


def _depth_factor(role: Role) -> float:
    return 1.0 if role.depth is None else 1 / math.sqrt(role.depth)


def _fan_in(role: Role) -> int:
    if role.fan_in is None:
        raise ValueError(f"{role} has no `fan_in`: `get_roles` takes it from the shape.")
    return role.fan_in
