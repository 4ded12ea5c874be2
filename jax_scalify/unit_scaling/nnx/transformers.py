"""Transformers of unit scale for Flax NNX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_scalify.unit_scaling import _modules
from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling.nnx.layers import Embed, Linear, LinearReadout, RMSNorm
from jax_scalify.unit_scaling.residuals import ResidualScheme
from jax_scalify.unit_scaling.umup import UmupConfig


class MLP(nnx.Module):
    """A feed-forward layer with SwiGLU: `down(up(x) * silu(gate(x)))`.

    Args:
        width: of input and output.
        hidden: between, by default `4 * width`.
        act_mult: of the operand of SwiGLU's sigmoid.
        fp8: whether `up` and `gate` multiply in FP8; `down`, which is critical, does not.
        depth: layers of the residual stack that it is in, or None.
        dtype, param_dtype, rngs: as of `Linear`.

    Source: Blake et al., *u-µP* (2024), table 2 and section 4.2.

    Examples:
        >>> from flax.nnx import Rngs
        >>> from jax_scalify.unit_scaling import nnx
        >>> nnx.MLP(8, rngs=Rngs(0)).down.kernel.shape
        (32, 8)
    """

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        *,
        act_mult: float = 1.0,
        fp8: bool = False,
        depth: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        hidden = 4 * width if hidden is None else hidden
        options: dict[str, Any] = dict(
            depth=depth, dtype=dtype, param_dtype=param_dtype, rngs=rngs, constraint=None
        )
        # No constraint: what the factors of one matrix are, those of the other are backwards.
        self.up = Linear(width, hidden, fp8=fp8, **options)
        self.gate = Linear(width, hidden, fp8=fp8, **options)
        self.down = Linear(hidden, width, **options)
        self.act_mult = act_mult

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(..., width)` to the same shape."""
        return self.down(F.silu_glu(self.up(x), self.gate(x), mult=self.act_mult))


class MHSA(nnx.Module):
    """Self-attention of several heads, with the rotary embedding.

    Args:
        width: of input and output.
        num_heads: that share the width.
        is_causal: whether positions see only those before them.
        rope: whether queries and keys are rotated by their position.
        softmax_mult: of the operand of the softmax.
        fp8: whether `query`, `key` and `value` multiply in FP8; `out`, which is critical, does not.
        depth: layers of the residual stack that it is in, or None.
        dtype, param_dtype, rngs: as of `Linear`.

    Raises:
        ValueError: if the heads cannot share the width.

    Source: Blake et al., *u-µP* (2024), table 2 and section 4.2.

    Examples:
        >>> from flax.nnx import Rngs
        >>> from jax_scalify.unit_scaling import nnx
        >>> nnx.MHSA(8, 2, rngs=Rngs(0))(jnp.ones((1, 3, 8))).shape
        (1, 3, 8)
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        is_causal: bool = True,
        rope: bool = True,
        softmax_mult: float = 1.0,
        fp8: bool = False,
        depth: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        _modules.check_heads(width, num_heads, rope)
        options: dict[str, Any] = dict(depth=depth, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.query = Linear(width, width, fp8=fp8, **options)
        self.key = Linear(width, width, fp8=fp8, **options)
        self.value = Linear(width, width, fp8=fp8, **options)
        self.out = Linear(width, width, **options)
        self.num_heads, self.is_causal, self.rope = num_heads, is_causal, rope
        self.softmax_mult = softmax_mult

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(batch, positions, width)` to the same shape."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        options = (self.num_heads, self.softmax_mult, self.is_causal, self.rope)
        return self.out(_modules.attend(q, k, v, *options))


class TransformerLayer(nnx.Module):
    """Attention and MLP as residual branches, each behind an RMS norm.

    Args:
        width: of input and output.
        num_heads: of attention.
        hidden: of the MLP, by default `4 * width`.
        taus: ratios of the branches, attention and MLP, to their skip connections.
        config: hyperparameters of u-µP.
        is_causal: whether positions see only those before them.
        fp8: whether the matmuls that are not critical are in FP8.
        depth: layers of the residual stack that it is in, or None.
        dtype, param_dtype, rngs: as of `Linear`.

    Examples:
        >>> from flax.nnx import Rngs
        >>> from jax_scalify.unit_scaling import nnx
        >>> nnx.TransformerLayer(8, 2, rngs=Rngs(0))(jnp.ones((1, 3, 8))).shape
        (1, 3, 8)
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        hidden: int | None = None,
        *,
        taus: tuple[float, float] = (1.0, 1.0),
        config: UmupConfig = UmupConfig(),  # noqa: B008
        is_causal: bool = True,
        fp8: bool = False,
        depth: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = dict(
            fp8=fp8, depth=depth, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.attention_norm = RMSNorm(width)
        self.attention = MHSA(
            width, num_heads, is_causal=is_causal, softmax_mult=config.attn_softmax_mult, **options
        )
        self.mlp_norm = RMSNorm(width)
        self.mlp = MLP(width, hidden, act_mult=config.ffn_act_mult, **options)
        self.taus = taus

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(batch, positions, width)` to the same shape."""
        x = F.residual_apply(lambda x: self.attention(self.attention_norm(x)), x, self.taus[0])
        return F.residual_apply(lambda x: self.mlp(self.mlp_norm(x)), x, self.taus[1])


class TransformerDecoder(nnx.Module):
    """The Llama of u-µP: embedding, layers, RMS norm, readout.

    Args:
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
        rngs: for the parameters, of the stream `params`.

    Raises:
        ValueError: if the heads cannot share the width.

    Source: Blake et al., *u-µP* (2024), section 4 and appendix D.

    Examples:
        >>> from flax.nnx import Rngs
        >>> from jax_scalify.unit_scaling import nnx
        >>> model = nnx.TransformerDecoder(16, 8, num_layers=1, num_heads=2, rngs=Rngs(0))
        >>> model(jnp.array([[1, 2, 3]])).shape
        (1, 3, 16)
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        num_layers: int,
        num_heads: int,
        *,
        hidden: int | None = None,
        config: UmupConfig = UmupConfig(),  # noqa: B008
        residuals: ResidualScheme | None = None,
        fp8: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.embed = Embed(vocab_size, width, **options)
        branches: dict[str, Any] = dict(config=config, fp8=fp8, depth=num_layers, **options)
        self.layers = nnx.List(
            TransformerLayer(width, num_heads, hidden, taus=taus, **branches)
            for taus in _modules.branch_taus(config, residuals, num_layers)
        )
        self.norm = RMSNorm(width)
        self.readout = LinearReadout(width, vocab_size, **options)
        self.config = config

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Map integers `(batch, positions)` to logits `(batch, positions, vocab_size)`."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.readout(self.norm(x))

    def loss(self, ids: jax.Array, labels: jax.Array, where: jax.Array | None = None) -> jax.Array:
        """Return the cross entropy of labels `(batch, positions)`, the mean of where it counts."""
        return F.cross_entropy(self(ids), labels, mult=self.config.loss_softmax_mult, where=where)
