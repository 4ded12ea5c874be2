"""What a parameter is for: the learning rates of u-µP go by it.

The modules of `unit_scaling.nnx` and `unit_scaling.linen` know the roles of their parameters. For
others a tree of roles does, or a function of a parameter's path.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.arrays.scaled_array import is_scaled

ROLES = ("weight", "output", "bias", "norm", "embedding")


@dataclasses.dataclass(frozen=True)
class Role:
    """The role of a parameter, and the sizes that its learning rate depends on.

    Attributes:
        name: "weight" (of a hidden layer), "output" (of the readout), "bias", "norm" (the weight of
            a norm) or "embedding".
        fan_in: of a weight, the number of terms in the sums it makes; of an embedding its width; of
            a bias or norm the number of features. None stands for what the shape tells: the last
            axis is that of the outputs, all others are summed over. Of stacked parameters the
            shape tells something else.
        depth: number of layers in the residual stack around it, or None outside of one.

    Raises:
        ValueError: if the name is not known, or a number is not positive.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.Role("weight", depth=2)
        Role(name='weight', fan_in=None, depth=2)
    """

    name: str
    fan_in: int | None = None
    depth: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no role."""
        if self.name not in ROLES:
            known = ", ".join(map(repr, ROLES))
            raise ValueError(f"`name` of a Role must be one of {known}, got {self.name!r}.")
        for field in ("fan_in", "depth"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ValueError(f"`{field}` of a Role must be positive or None, got {value}.")


Roles = Any  # a tree of roles or their names, or a function of a parameter's path


def get_roles(params: Any, roles: Roles | Callable[[str], Any] = None) -> Any:
    """Return the role of each parameter.

    Args:
        params: a pytree of arrays: the state of an NNX module, the variables of a linen module with
            their boxes, or any other.
        roles: None to take the roles that the parameters carry; or a tree like that of `params`
            with a `Role` or its name for each, whose parts may stand for all below them; or a
            function of the path of a parameter, such as "layers/0/query/kernel", that returns a
            `Role` or its name. Both take precedence over what a parameter carries; where they have
            None, that stays.

    Returns:
        A pytree like `params` with a `Role` for each, whose `fan_in` is a number.

    Raises:
        ValueError: if a parameter has no role, or the trees do not fit.
        TypeError: if a role is neither a `Role` nor a name.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> params = {"kernel": jnp.ones((16, 4)), "bias": jnp.ones(4)}
        >>> us.get_roles(params, lambda path: "bias" if path == "bias" else "weight")["kernel"]
        Role(name='weight', fan_in=16, depth=None)
        >>> us.get_roles(params, {"kernel": "weight", "bias": "bias"})["bias"]
        Role(name='bias', fan_in=4, depth=None)
    """
    leaves, structure = jax.tree.flatten_with_path(params, is_leaf=_is_parameter)
    if callable(roles):
        given = [roles(path_name(path)) for path, _ in leaves]
    elif roles is None:
        given = [None] * len(leaves)
    else:
        given = _broadcast(roles, params)
    found = []
    for (path, leaf), role in zip(leaves, given, strict=True):
        role = _carried(leaf) if role is None else role
        name = path_name(path)
        if role is None:
            raise ValueError(
                f"The parameter {name!r} has no role: give `roles`, a tree or a function of the "
                f"path that returns one of {', '.join(map(repr, ROLES))}."
            )
        found.append(_complete(role, leaf, name))
    return jax.tree.unflatten(structure, found)


def path_name(path: Any) -> str:
    """Return the path of a parameter, as a function of roles gets it."""
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return "/".join(names)


def _is_parameter(x: Any) -> bool:
    """Arrays, the variables of NNX, and the boxes of linen."""
    return is_scaled(x) or hasattr(x, "get_metadata") or hasattr(x, "unbox")


def _carried(x: Any) -> Any:
    """The role in the metadata of a variable, or of a box or one inside of it."""
    if isinstance(getattr(x, "role", None), str | Role):
        return x.role
    return _carried(x.value) if hasattr(x, "unbox") else None


def _broadcast(roles: Any, params: Any) -> list[Any]:
    def is_role(x: Any) -> bool:
        return x is None or isinstance(x, str | Role)

    def spread(role: Any, part: Any) -> list[Any]:
        return [role] * len(jax.tree.leaves(part, is_leaf=_is_parameter))

    try:
        parts = jax.tree.map(spread, roles, params, is_leaf=is_role)
    except ValueError as error:
        raise ValueError(f"`roles` must be a tree like that of the parameters: {error}") from None
    return jax.tree.leaves(parts, is_leaf=lambda x: x is None or isinstance(x, Role))


def _complete(role: Any, leaf: Any, name: str) -> Role:
    """The role with its `fan_in`, from the shape unless it is known."""
    role = Role(role) if isinstance(role, str) else role
    if not isinstance(role, Role):
        raise TypeError(
            f"The role of {name!r} must be a Role or its name, got {type(role).__name__}."
        )
    if role.fan_in is not None:
        return role
    shape = leaf.shape if is_scaled(leaf) else jnp.shape(jax.tree.leaves(leaf)[0])
    if role.name in ("weight", "output"):
        if len(shape) < 2:
            raise ValueError(
                f"The parameter {name!r} of shape {shape} has no axis to sum over: as a "
                f"{role.name!r} it needs two, or its Role a `fan_in`."
            )
        return dataclasses.replace(role, fan_in=math.prod(shape[:-1]))
    return dataclasses.replace(role, fan_in=shape[-1] if shape else 1)
