"""Layers of unit scale for Flax linen: linear, embedding, normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, struct

from jax_scalify.unit_scaling import _modules
from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling.constraints import Constraint
from jax_scalify.unit_scaling.roles import Role


class WithRole(struct.PyTreeNode, linen.meta.AxisMetadata):
    """A parameter and its role, in a box of linen's.

    Attributes:
        value: the array, or another box.
        role: a `Role`.
    """

    value: Any
    role: Role = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        """Return what is in the box."""
        return self.value

    def replace_boxed(self, val: Any) -> WithRole:
        """Return a box of the same role with another value."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> WithRole:
        """Keep the role: what is stacked is still as wide."""
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> WithRole:
        """Keep the role."""
        return self


def with_role(
    init: Callable[..., Any], name: str, fan_in: int | None = None, depth: int | None = None
) -> Callable[..., WithRole]:
    """Make an initialiser put what it makes in a box with a role.

    Args:
        init: an initialiser, of a key, a shape and a dtype.
        name: of the `Role`.
        fan_in: of the `Role`.
        depth: of the `Role`.

    Returns:
        An initialiser.

    Raises:
        ValueError: if there is no such role.

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> init = linen.with_role(jax.nn.initializers.normal(1.0), "weight", fan_in=4)
        >>> init(jax.random.key(0), (4, 2)).role
        Role(name='weight', fan_in=4, depth=None)
    """
    role = Role(name, fan_in, depth)

    def boxed(*args: Any, **kwargs: Any) -> WithRole:
        return WithRole(init(*args, **kwargs), role)

    return boxed


_UNIT, _ONES, _ZEROS = (
    jax.nn.initializers.normal(1.0),
    jax.nn.initializers.ones,
    jax.nn.initializers.zeros,
)


class _Linear(linen.Module):
    """The parameters of linear layers, and the layer."""

    def _apply(self: Any, x: jax.Array, role: str, fp8: bool, depth: int | None) -> jax.Array:
        fan_in = x.shape[-1]
        shape = (fan_in, self.features)
        kernel = self.param(
            "kernel", with_role(_UNIT, role, fan_in, depth), shape, self.param_dtype
        )
        bias = None
        if self.use_bias:
            init = with_role(_ZEROS, "bias", self.features, depth)
            bias = self.param("bias", init, shape[1:], self.param_dtype)
        return _modules.linear(x, kernel, bias, self.constraint, fp8, role == "output", self.dtype)


class Linear(_Linear):
    """A linear layer: `us.functional.linear` of a unit Gaussian kernel and a bias of zeros.

    Attributes:
        features: size of the last axis of the output.
        use_bias: whether there is one.
        constraint: on the factors of the result and of the gradient of the input.
        fp8: cast the operands of the matmul to E4M3, and the cotangent to E5M2.
        depth: layers of the residual stack that it is in, or None.
        dtype: of the computation, by default what input and parameters promote to.
        param_dtype: of the parameters.

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> params = linen.Linear(4).init(jax.random.key(0), jnp.ones((2, 16)))["params"]
        >>> params["kernel"].role
        Role(name='weight', fan_in=16, depth=None)
    """

    features: int
    use_bias: bool = False
    constraint: Constraint = "to_output_scale"
    fp8: bool = False
    depth: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(..., fan_in)` to `(..., features)`."""
        return self._apply(x, "weight", self.fp8, self.depth)


class LinearReadout(_Linear):
    """The last layer: `us.functional.linear_readout`. It stays in the wider dtype.

    Attributes:
        features, use_bias, dtype, param_dtype: as of `Linear`.
        constraint: by default none, which the cut-edge at the end of a network allows.

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> params = linen.LinearReadout(4).init(jax.random.key(0), jnp.ones((2, 16)))["params"]
        >>> params["kernel"].role.name
        'output'
    """

    features: int
    use_bias: bool = False
    constraint: Constraint = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(..., fan_in)` to `(..., features)`."""
        return self._apply(x, "output", False, None)


class Embed(linen.Module):
    """A table of unit Gaussians whose rows `us.functional.embedding` looks up.

    A tied table is the readout's matrix too, with the role "output": `Embed` of
    `jax_scalify.unit_scaling.nnx` derives it.

    Attributes:
        num_embeddings: rows of the table.
        features: width of a row.
        tied: whether `attend` reads out with the same table.
        dtype: of the result, by default that of the table.
        param_dtype: of the table.

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> linen.Embed(16, 4).init_with_output(jax.random.key(0), jnp.array([3]))[0].shape
        (1, 4)
    """

    num_embeddings: int
    features: int
    tied: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def setup(self):
        init = with_role(_UNIT, "output" if self.tied else "embedding", self.features)
        shape = (self.num_embeddings, self.features)
        self.embedding = self.param("embedding", init, shape, self.param_dtype)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Map integers `(...)` to `(..., features)`."""
        table = _modules.tied(self.embedding, self.tied)
        return F.embedding(ids, *_modules.promoted(self.dtype, table))

    def attend(self, x: jax.Array) -> jax.Array:
        """Read out with the table: map `(..., features)` to `(..., num_embeddings)`."""
        table = _modules.tied(self.embedding, self.tied)
        return _modules.linear(x, table.T, None, None, False, True, self.dtype)


class Dropout(linen.Module):
    """`us.functional.dropout`: what is left keeps unit scale, and evaluation has the mean.

    Attributes:
        rate: probability of 0, in `[0, 1)`; its keys are of the stream `dropout`.

    Raises:
        ValueError: when it is applied, if `rate` is not in `[0, 1)`.

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> linen.Dropout(0.75).apply({}, jnp.ones(3), deterministic=True)
        Array([0.5, 0.5, 0.5], dtype=float32)
    """

    rate: float

    @linen.compact
    def __call__(self, x: jax.Array, deterministic: bool = False) -> jax.Array:
        """Set elements to 0, of an array of any shape; `deterministic` for evaluation."""
        rate = _modules.check_rate(self.rate)
        key = None if deterministic or not rate else self.make_rng("dropout")
        return F.dropout(x, rate, key, deterministic)


class LayerNorm(linen.Module):
    """`us.functional.layer_norm` of the last axis, by default without parameters.

    Attributes:
        use_scale: whether there is a weight, of ones.
        use_bias: whether there is a bias, of zeros.
        epsilon: added to the variance.
        depth: layers of the residual stack that it is in, or None.
        param_dtype: of the parameters.

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> linen.LayerNorm().apply({}, jnp.array([1.0, 3.0])).round(2)
        Array([-1.,  1.], dtype=float32)
    """

    use_scale: bool = False
    use_bias: bool = False
    epsilon: float = 1e-5
    depth: int | None = None
    param_dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        shape, scale, bias = x.shape[-1:], None, None
        if self.use_scale:
            init = with_role(_ONES, "norm", shape[0], self.depth)
            scale = self.param("scale", init, shape, self.param_dtype)
        if self.use_bias:
            init = with_role(_ZEROS, "bias", shape[0], self.depth)
            bias = self.param("bias", init, shape, self.param_dtype)
        return F.layer_norm(x, scale, bias, eps=self.epsilon)


class RMSNorm(linen.Module):
    """`us.functional.rms_norm` of the last axis, by default without parameters.

    Attributes:
        use_scale, epsilon, depth, param_dtype: as of `LayerNorm`.

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> linen.RMSNorm().apply({}, jnp.array([3.0, 3.0])).round(2)
        Array([1., 1.], dtype=float32)
    """

    use_scale: bool = False
    epsilon: float = 1e-5
    depth: int | None = None
    param_dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        scale = None
        if self.use_scale:
            init = with_role(_ONES, "norm", x.shape[-1], self.depth)
            scale = self.param("scale", init, x.shape[-1:], self.param_dtype)
        return F.rms_norm(x, scale, eps=self.epsilon)
