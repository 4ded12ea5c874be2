"""Modules of Flax linen with unit scale: `from jax_scalify.unit_scaling import linen`.

They are those of `jax_scalify.unit_scaling.nnx`, with the same parameters under the same names.
Weights are unit Gaussians, and each parameter is in a box, `WithRole`, that tells its role, as
`flax.linen.Partitioned` tells partitions: `apply`, optax and `TrainState` take boxes as they are.
`flax.linen.meta.unbox` leaves arrays; take the roles first then, with `us.get_roles`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import linen as _linen
    from flax import struct as _struct
except ImportError as error:  # pragma: no cover
    raise ImportError("`jax_scalify.unit_scaling.linen` needs Flax: `pip install flax`.") from error

from jax_scalify.unit_scaling import _modules
from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling.constraints import Constraint
from jax_scalify.unit_scaling.residuals import ResidualScheme
from jax_scalify.unit_scaling.roles import Role
from jax_scalify.unit_scaling.umup import UmupConfig

__all__ = [
    "MHSA",
    "MLP",
    "Embed",
    "LayerNorm",
    "Linear",
    "LinearReadout",
    "RMSNorm",
    "TransformerDecoder",
    "TransformerLayer",
    "WithRole",
    "with_role",
]


class WithRole(_struct.PyTreeNode, _linen.meta.AxisMetadata):
    """A parameter and its role, in a box of linen's.

    Attributes:
        value: the array, or another box.
        role: a `Role`.
    """

    value: Any
    role: Role = _struct.field(pytree_node=False)

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


class _Linear(_linen.Module):
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

    @_linen.compact
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

    @_linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(..., fan_in)` to `(..., features)`."""
        return self._apply(x, "output", False, None)


class Embed(_linen.Module):
    """A table of unit Gaussians whose rows `us.functional.embedding` looks up.

    Attributes:
        num_embeddings: rows of the table.
        features: width of a row.
        dtype: of the result, by default that of the table.
        param_dtype: of the table.

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> linen.Embed(16, 4).init_with_output(jax.random.key(0), jnp.array([3]))[0].shape
        (1, 4)
    """

    num_embeddings: int
    features: int
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @_linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Map integers `(...)` to `(..., features)`."""
        init = with_role(_UNIT, "embedding", self.features)
        shape = (self.num_embeddings, self.features)
        table = self.param("embedding", init, shape, self.param_dtype)
        return F.embedding(ids, *_modules.promoted(self.dtype, table))


class LayerNorm(_linen.Module):
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

    @_linen.compact
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


class RMSNorm(_linen.Module):
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

    @_linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        scale = None
        if self.use_scale:
            init = with_role(_ONES, "norm", x.shape[-1], self.depth)
            scale = self.param("scale", init, x.shape[-1:], self.param_dtype)
        return F.rms_norm(x, scale, eps=self.epsilon)


class MLP(_linen.Module):
    """A feed-forward layer with SwiGLU: `down(up(x) * silu(gate(x)))`.

    Attributes:
        hidden: size between, by default `4 * width`.
        act_mult: of the operand of SwiGLU's sigmoid.
        fp8: whether `up` and `gate` multiply in FP8; `down`, which is critical, does not.
        depth: layers of the residual stack that it is in, or None.
        dtype, param_dtype: as of `Linear`.

    Source: Blake et al., *u-µP* (2024), table 2 and section 4.2.

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> linen.MLP().init_with_output(jax.random.key(0), jnp.ones((2, 8)))[0].shape
        (2, 8)
    """

    hidden: int | None = None
    act_mult: float = 1.0
    fp8: bool = False
    depth: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @_linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(..., width)` to the same shape."""
        width = x.shape[-1]
        hidden = 4 * width if self.hidden is None else self.hidden
        # No constraint: what the factors of one matrix are, those of the other are backwards.
        options: dict[str, Any] = dict(
            depth=self.depth, dtype=self.dtype, param_dtype=self.param_dtype, constraint=None
        )
        up = Linear(hidden, fp8=self.fp8, name="up", **options)(x)
        gate = Linear(hidden, fp8=self.fp8, name="gate", **options)(x)
        return Linear(width, name="down", **options)(F.silu_glu(up, gate, mult=self.act_mult))


class MHSA(_linen.Module):
    """Self-attention of several heads, with the rotary embedding.

    Attributes:
        num_heads: that share the width.
        is_causal: whether positions see only those before them.
        rope: whether queries and keys are rotated by their position.
        softmax_mult: of the operand of the softmax.
        fp8: whether `query`, `key` and `value` multiply in FP8; `out`, which is critical, does not.
        depth: layers of the residual stack that it is in, or None.
        dtype, param_dtype: as of `Linear`.

    Source: Blake et al., *u-µP* (2024), table 2 and section 4.2.

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> linen.MHSA(2).init_with_output(jax.random.key(0), jnp.ones((1, 3, 8)))[0].shape
        (1, 3, 8)
    """

    num_heads: int
    is_causal: bool = True
    rope: bool = True
    softmax_mult: float = 1.0
    fp8: bool = False
    depth: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @_linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(batch, positions, width)` to the same shape."""
        width = x.shape[-1]
        _modules.check_heads(width, self.num_heads, self.rope)
        options: dict[str, Any] = dict(
            depth=self.depth, dtype=self.dtype, param_dtype=self.param_dtype
        )
        q, k, v = (
            Linear(width, fp8=self.fp8, name=name, **options)(x)
            for name in ("query", "key", "value")
        )
        heads = (self.num_heads, self.softmax_mult, self.is_causal, self.rope)
        return Linear(width, name="out", **options)(_modules.attend(q, k, v, *heads))


class TransformerLayer(_linen.Module):
    """Attention and MLP as residual branches, each behind an RMS norm.

    Attributes:
        num_heads: of attention.
        hidden: of the MLP, by default `4 * width`.
        taus: ratios of the branches, attention and MLP, to their skip connections.
        config: hyperparameters of u-µP.
        is_causal: whether positions see only those before them.
        fp8: whether the matmuls that are not critical are in FP8.
        depth: layers of the residual stack that it is in, or None.
        dtype, param_dtype: as of `Linear`.

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> layer = linen.TransformerLayer(num_heads=2)
        >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 3, 8)))[0].shape
        (1, 3, 8)
    """

    num_heads: int
    hidden: int | None = None
    taus: tuple[float, float] = (1.0, 1.0)
    config: UmupConfig = UmupConfig()
    is_causal: bool = True
    fp8: bool = False
    depth: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def setup(self):
        options: dict[str, Any] = dict(
            fp8=self.fp8, depth=self.depth, dtype=self.dtype, param_dtype=self.param_dtype
        )
        self.attention_norm = RMSNorm()
        self.attention = MHSA(
            self.num_heads,
            is_causal=self.is_causal,
            softmax_mult=self.config.attn_softmax_mult,
            **options,
        )
        self.mlp_norm = RMSNorm()
        self.mlp = MLP(self.hidden, act_mult=self.config.ffn_act_mult, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(batch, positions, width)` to the same shape."""
        x = F.residual_apply(lambda x: self.attention(self.attention_norm(x)), x, self.taus[0])
        return F.residual_apply(lambda x: self.mlp(self.mlp_norm(x)), x, self.taus[1])


class TransformerDecoder(_linen.Module):
    """The Llama of u-µP: embedding, layers, RMS norm, readout.

    Attributes:
        vocab_size: number of tokens.
        width: of the stream.
        num_layers: each with two residual branches.
        num_heads: of attention.
        hidden: of the MLPs, by default `4 * width`.
        config: hyperparameters of u-µP.
        residuals: a scheme of residual branches instead of `config.residuals()`.
        fp8: whether the matmuls that are not critical are in FP8: those that make queries, keys and
            values, and those into the MLPs.
        dtype: of the computation, by default that of the parameters.
        param_dtype: of the parameters.

    Source: Blake et al., *u-µP* (2024), section 4 and appendix D.

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> model = linen.TransformerDecoder(16, 8, num_layers=1, num_heads=2)
        >>> model.init_with_output(jax.random.key(0), jnp.array([[1, 2, 3]]))[0].shape
        (1, 3, 16)
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    hidden: int | None = None
    config: UmupConfig = UmupConfig()
    residuals: ResidualScheme | None = None
    fp8: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def setup(self):
        options: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        self.embed = Embed(self.vocab_size, self.width, **options)
        branches: dict[str, Any] = dict(
            config=self.config, fp8=self.fp8, depth=self.num_layers, **options
        )
        self.layers = [
            TransformerLayer(self.num_heads, self.hidden, taus=taus, **branches)
            for taus in _modules.branch_taus(self.config, self.residuals, self.num_layers)
        ]
        self.norm = RMSNorm()
        self.readout = LinearReadout(self.vocab_size, **options)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Map integers `(batch, positions)` to logits `(batch, positions, vocab_size)`."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.readout(self.norm(x))

    def loss(self, ids: jax.Array, labels: jax.Array, where: jax.Array | None = None) -> jax.Array:
        """Return the cross entropy of labels `(batch, positions)`, the mean of where it counts."""
        return F.cross_entropy(self(ids), labels, mult=self.config.loss_softmax_mult, where=where)
