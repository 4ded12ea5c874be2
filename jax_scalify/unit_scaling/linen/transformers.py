"""Transformers of unit scale for Flax linen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jax_scalify.unit_scaling import _modules
from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling.linen.layers import Embed, Linear, LinearReadout, RMSNorm
from jax_scalify.unit_scaling.residuals import ResidualScheme
from jax_scalify.unit_scaling.umup import UmupConfig


class MLP(linen.Module):
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

    @linen.compact
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


class MHSA(linen.Module):
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

    @linen.compact
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


class TransformerLayer(linen.Module):
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


class TransformerDecoder(linen.Module):
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
