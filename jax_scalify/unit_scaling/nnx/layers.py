"""Layers of unit scale for Flax NNX: linear, embedding, normalisation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_scalify.unit_scaling import _modules
from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling.constraints import Constraint
from jax_scalify.unit_scaling.roles import Role


class Linear(nnx.Module):
    """A linear layer: `us.functional.linear` of a unit Gaussian kernel and a bias of zeros.

    Args:
        in_features: size of the last axis of the input.
        out_features: that of the output.
        use_bias: whether there is one.
        constraint: on the factors of the result and of the gradient of the input.
        fp8: cast the operands of the matmul to E4M3, and the cotangent to E5M2.
        depth: layers of the residual stack that it is in, or None.
        dtype: of the computation, by default what input and parameters promote to.
        param_dtype: of the parameters.
        rngs: for the kernel, of the stream `params`.

    Examples:
        >>> from flax.nnx import Rngs
        >>> from jax_scalify.unit_scaling import nnx
        >>> nnx.Linear(16, 4, rngs=Rngs(0)).kernel.role
        Role(name='weight', fan_in=16, depth=None)
    """

    _role = "weight"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        constraint: Constraint = "to_output_scale",
        fp8: bool = False,
        depth: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        kernel = jax.random.normal(rngs.params(), (in_features, out_features), param_dtype)
        self.kernel = nnx.Param(kernel, role=Role(self._role, in_features, depth))
        self.bias = _vector(jnp.zeros, "bias", out_features, depth, param_dtype, use_bias)
        self.constraint, self.fp8, self.dtype = constraint, fp8, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(..., in_features)` to `(..., out_features)`."""
        readout = self._role == "output"
        bias = _value(self.bias)
        return _modules.linear(
            x, self.kernel[...], bias, self.constraint, self.fp8, readout, self.dtype
        )


class LinearReadout(Linear):
    """The last layer: `us.functional.linear_readout`. It stays in the wider dtype.

    Args:
        in_features, out_features, use_bias, dtype, param_dtype, rngs: as of `Linear`.
        constraint: by default none, which the cut-edge at the end of a network allows.

    Examples:
        >>> from flax.nnx import Rngs
        >>> from jax_scalify.unit_scaling import nnx
        >>> nnx.LinearReadout(16, 4, rngs=Rngs(0)).kernel.role.name
        'output'
    """

    _role = "output"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        constraint: Constraint = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            out_features,
            use_bias=use_bias,
            constraint=constraint,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )


class Embed(nnx.Module):
    """A table of unit Gaussians whose rows `us.functional.embedding` looks up.

    A tied table is the readout's matrix too. Both uses want the initial scale 1, and have factors
    of their own: 1 here, 1/width in `attend`. Two things have to be derived:

    - The gradients of both uses must add up in the ratio of the true ones. Behind the readout the
      gradient of the stream has the factor 1/√rows, and that of the table in `embedding`
      √(rows / ids): together 1/√ids, which is the factor of the table as the readout's weight. So
      the sum is right as it is, up to one constant, with a readout that has no constraint. 1/√2
      gives the sum unit scale.
    - There is one learning rate. The role is "output": updates move logits as far at every width,
      and µP has the same learning rate for both uses. The smaller one that u-µP has for embeddings,
      by 1/√width, would let the readout stand still in wide models.

    Args:
        num_embeddings: rows of the table.
        features: width of a row.
        tied: whether `attend` reads out with the same table.
        dtype: of the result, by default that of the table.
        param_dtype: of the table.
        rngs: for the table, of the stream `params`.

    Source: Yang et al., *Tensor Programs V* (2022), table 8, where input and output weights can be
    tied; Blake et al., *u-µP* (2024), table 2 and section 4.4; Press & Wolf (2017).

    Examples:
        >>> from flax.nnx import Rngs
        >>> from jax_scalify.unit_scaling import nnx
        >>> nnx.Embed(16, 4, rngs=Rngs(0)).embedding.role
        Role(name='embedding', fan_in=4, depth=None)
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        tied: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        table = jax.random.normal(rngs.params(), (num_embeddings, features), param_dtype)
        self.embedding = nnx.Param(table, role=Role("output" if tied else "embedding", features))
        self.tied, self.dtype = tied, dtype

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Map integers `(...)` to `(..., features)`."""
        return F.embedding(ids, *_modules.promoted(self.dtype, self._table()))

    def attend(self, x: jax.Array) -> jax.Array:
        """Read out with the table: map `(..., features)` to `(..., num_embeddings)`."""
        return _modules.linear(x, self._table().T, None, None, False, True, self.dtype)

    def _table(self) -> jax.Array:
        return _modules.tied(self.embedding[...], self.tied)


class Dropout(nnx.Dropout):
    """`us.functional.dropout`: what is left keeps unit scale, and evaluation has the mean.

    It is that of Flax in all but the factors: `model.train()` and `model.eval()` switch it, and its
    keys are of the stream `dropout`.

    Args:
        rate: probability of 0, in `[0, 1)`.
        deterministic: whether evaluation is meant.
        rngs: for keys, or None if each call has its own.

    Raises:
        ValueError: if `rate` is not in `[0, 1)`.

    Examples:
        >>> from flax.nnx import Rngs
        >>> from jax_scalify.unit_scaling import nnx
        >>> nnx.Dropout(0.75, deterministic=True, rngs=Rngs(0))(jnp.ones(3))
        Array([0.5, 0.5, 0.5], dtype=float32)
    """

    def __init__(
        self,
        rate: float,
        *,
        deterministic: bool = False,
        rngs: nnx.Rngs | None = None,
    ):
        super().__init__(_modules.check_rate(rate), deterministic=deterministic, rngs=rngs)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: Any = None,
    ) -> jax.Array:
        """Set elements to 0, of an array of any shape."""
        evaluated = bool(self.deterministic if deterministic is None else deterministic)
        source = self.rngs if rngs is None else rngs
        if evaluated or not self.rate or source is None:
            return F.dropout(inputs, self.rate, deterministic=evaluated)
        if isinstance(source, jax.Array):
            key = source
        else:
            key = source.dropout() if isinstance(source, nnx.Rngs) else source()
        return F.dropout(inputs, self.rate, key)


class LayerNorm(nnx.Module):
    """`us.functional.layer_norm` of the last axis, by default without parameters.

    Args:
        features: size of the last axis.
        use_scale: whether there is a weight, of ones.
        use_bias: whether there is a bias, of zeros.
        epsilon: added to the variance.
        depth: layers of the residual stack that it is in, or None.
        param_dtype: of the parameters.

    Examples:
        >>> from jax_scalify.unit_scaling import nnx
        >>> nnx.LayerNorm(2)(jnp.array([1.0, 3.0])).round(2)
        Array([-1.,  1.], dtype=float32)
    """

    def __init__(
        self,
        features: int,
        *,
        use_scale: bool = False,
        use_bias: bool = False,
        epsilon: float = 1e-5,
        depth: int | None = None,
        param_dtype: Any = jnp.float32,
    ):
        self.scale = _vector(jnp.ones, "norm", features, depth, param_dtype, use_scale)
        self.bias = _vector(jnp.zeros, "bias", features, depth, param_dtype, use_bias)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        return F.layer_norm(x, _value(self.scale), _value(self.bias), eps=self.epsilon)


class RMSNorm(nnx.Module):
    """`us.functional.rms_norm` of the last axis, by default without parameters.

    Args:
        features, use_scale, epsilon, depth, param_dtype: as of `LayerNorm`.

    Examples:
        >>> from jax_scalify.unit_scaling import nnx
        >>> nnx.RMSNorm(2)(jnp.array([3.0, 3.0])).round(2)
        Array([1., 1.], dtype=float32)
    """

    def __init__(
        self,
        features: int,
        *,
        use_scale: bool = False,
        epsilon: float = 1e-5,
        depth: int | None = None,
        param_dtype: Any = jnp.float32,
    ):
        self.scale = _vector(jnp.ones, "norm", features, depth, param_dtype, use_scale)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        return F.rms_norm(x, _value(self.scale), eps=self.epsilon)


def _vector(
    init: Any, role: str, features: int, depth: int | None, dtype: Any, use: bool
) -> nnx.Param | None:
    """A parameter of one axis, if it is used."""
    return nnx.Param(init(features, dtype), role=Role(role, features, depth)) if use else None


def _value(param: Any) -> Any:
    return None if param is None else param[...]
