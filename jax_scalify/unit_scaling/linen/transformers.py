"""Transformers of unit scale for Flax linen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jax_scalify.unit_scaling import _modules
from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling.linen.experts import MoEMLP
from jax_scalify.unit_scaling.linen.layers import Dropout, Embed, Linear, LinearReadout, RMSNorm
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

    Source: Blake et al., *u-µP* (2024), section 4.2 and appendix B.

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
        num_heads: of queries, that share the width.
        num_kv_heads: of keys and values, each for `num_heads / num_kv_heads` heads of queries; by
            default as many as of queries.
        is_causal: whether positions see only those before them.
        window: how many positions before and behind its own one sees, one number or a pair; by
            default all.
        rope: whether queries and keys are rotated by their position.
        qk_norm: whether each head's queries and keys are normalised, by an RMS norm with a weight.
            Scores are then at most `softmax_mult` as long as the weights are 1.
        softmax_mult: of the operand of the softmax.
        fp8: whether `query`, `key` and `value` multiply in FP8; `out`, which is critical, does not.
        depth: layers of the residual stack that it is in, or None.
        dtype, param_dtype: as of `Linear`.

    Source: Blake et al., *u-µP* (2024), section 4.2 and appendix B; Ainslie et al., *GQA* (2023);
    Henry et al., *Query-Key Normalization* (2020).

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> layer = linen.MHSA(2, num_kv_heads=1)
        >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 3, 8)))[0].shape
        (1, 3, 8)
    """

    num_heads: int
    num_kv_heads: int | None = None
    is_causal: bool = True
    window: int | tuple[int, int] | None = None
    rope: bool = True
    qk_norm: bool = False
    softmax_mult: float = 1.0
    fp8: bool = False
    depth: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(batch, positions, width)` to the same shape."""
        width = x.shape[-1]
        groups = _modules.check_heads(width, self.num_heads, self.num_kv_heads, self.rope)
        kv_width = groups * (width // self.num_heads)
        params: dict[str, Any] = dict(depth=self.depth, param_dtype=self.param_dtype)
        options: dict[str, Any] = dict(dtype=self.dtype, **params)
        query = Linear(width, fp8=self.fp8, name="query", **options)(x)
        # No constraint: see `_modules.attend`.
        key, value = (
            Linear(kv_width, fp8=self.fp8, constraint=None, name=name, **options)(x)
            for name in ("key", "value")
        )
        q = _modules.heads_of(query, self.num_heads)
        k, v = (_modules.heads_of(y, groups) for y in (key, value))
        if self.qk_norm:
            q = RMSNorm(use_scale=True, name="query_norm", **params)(q)
            k = RMSNorm(use_scale=True, name="key_norm", **params)(k)
        attention = dict(is_causal=self.is_causal, window=self.window, mult=self.softmax_mult)
        out = _modules.attend(q, k, v, self.rope, **attention)
        return Linear(width, name="out", **options)(out)


class TransformerLayer(linen.Module):
    """Attention and MLP as residual branches, each behind an RMS norm.

    Attributes:
        num_heads: of attention.
        hidden: of the MLP, by default `4 * width`.
        num_kv_heads, is_causal, window, rope, qk_norm: as of `MHSA`.
        taus: ratios of the branches, attention and MLP, to their skip connections.
        config: hyperparameters of u-µP.
        num_experts: of a `MoEMLP` in place of the MLP, or None.
        experts_per_token: of these, for each token; one as in a Switch Transformer, several with
            weights that add up to 1.
        dropout_rate: of the `Dropout` at the end of each branch.
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
    num_kv_heads: int | None = None
    is_causal: bool = True
    window: int | tuple[int, int] | None = None
    rope: bool = True
    qk_norm: bool = False
    taus: tuple[float, float] = (1.0, 1.0)
    config: UmupConfig = UmupConfig()
    num_experts: int | None = None
    experts_per_token: int = 2
    dropout_rate: float = 0.0
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
            num_kv_heads=self.num_kv_heads,
            is_causal=self.is_causal,
            window=self.window,
            rope=self.rope,
            qk_norm=self.qk_norm,
            softmax_mult=self.config.attn_softmax_mult,
            **options,
        )
        self.mlp_norm = RMSNorm()
        options["act_mult"] = self.config.ffn_act_mult
        if self.num_experts is None:
            self.mlp = MLP(self.hidden, **options)
        else:
            k = self.experts_per_token
            routing: dict[str, Any] = dict(k=k, normalize=k > 1)
            self.mlp = MoEMLP(self.num_experts, self.hidden, **routing, **options)
        self.dropout = Dropout(self.dropout_rate)

    def __call__(self, x: jax.Array, taus: Any = None, deterministic: bool = False) -> Any:
        """Map `(batch, positions, width)` to the same shape.

        `taus`, if given, are used instead of the layer's; `deterministic` is for evaluation. With
        experts it returns that and their loss for balance.
        """
        attention_tau, mlp_tau = self.taus if taus is None else taus

        def attention(x: jax.Array) -> jax.Array:
            return self.dropout(self.attention(self.attention_norm(x)), deterministic)

        x = F.residual_apply(attention, x, attention_tau)
        branch, skip = F.residual_split(x, mlp_tau)
        out, balance = _modules.with_balance(self.mlp(self.mlp_norm(branch)))
        x = F.residual_add(self.dropout(out, deterministic), skip, mlp_tau)
        return x if balance is None else (x, balance)


class TransformerDecoder(linen.Module):
    """The Llama of u-µP: embedding, layers, RMS norm, readout.

    Attributes:
        vocab_size: number of tokens.
        width: of the stream.
        num_layers: each with two residual branches.
        num_heads: of attention.
        hidden: of the MLPs, by default `4 * width`.
        num_kv_heads, window, qk_norm: as of `MHSA`.
        tie_embeddings: whether the readout multiplies by the table of the embedding; `Embed` says
            what its scales and its role are then.
        num_experts, experts_per_token: as of `TransformerLayer`.
        balance_mult: of the layers' losses for balance, which `loss` then adds up.
        config: hyperparameters of u-µP.
        residuals: a scheme of residual branches instead of `config.residuals()`.
        dropout_rate: of the `Dropout` at the end of each branch and behind the embedding.
        scan_layers: whether the layers are one, compiled once, whose parameters are stacked along a
            first axis under `layers` and which `jax.lax.scan` runs `num_layers` times.
        remat: whether a layer's values are computed again in the backward pass, instead of kept; or
            a policy of `jax.checkpoint` that says which.
        fp8: whether the matmuls that are not critical are in FP8: those that make queries, keys and
            values, and those into the MLPs.
        dtype: of the computation, by default that of the parameters.
        param_dtype: of the parameters.

    Source: Blake et al., *u-µP* (2024), section 4.

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
    num_kv_heads: int | None = None
    window: int | tuple[int, int] | None = None
    qk_norm: bool = False
    tie_embeddings: bool = False
    num_experts: int | None = None
    experts_per_token: int = 2
    balance_mult: float = 0.01
    config: UmupConfig = UmupConfig()
    residuals: ResidualScheme | None = None
    dropout_rate: float = 0.0
    scan_layers: bool = False
    remat: bool | Callable[..., bool] = False
    fp8: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def setup(self):
        options: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        self.embed = Embed(self.vocab_size, self.width, tied=self.tie_embeddings, **options)
        self.taus = _modules.branch_taus(self.config, self.residuals, self.num_layers)
        branches: dict[str, Any] = dict(
            num_kv_heads=self.num_kv_heads,
            window=self.window,
            qk_norm=self.qk_norm,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            config=self.config,
            dropout_rate=self.dropout_rate,
            fp8=self.fp8,
            depth=self.num_layers,
            **options,
        )
        if self.scan_layers:
            _modules.check_scan(self.num_layers)
            self.layers = TransformerLayer(self.num_heads, self.hidden, **branches)
        else:
            self.layers = [
                TransformerLayer(self.num_heads, self.hidden, taus=taus, **branches)
                for taus in self.taus
            ]
        self.norm = RMSNorm()
        if not self.tie_embeddings:
            self.readout = LinearReadout(self.vocab_size, **options)
        self.dropout = Dropout(self.dropout_rate)

    def __call__(self, ids: jax.Array, deterministic: bool = False) -> jax.Array:
        """Map integers `(batch, positions)` to logits `(batch, positions, vocab_size)`.

        With dropout, it takes keys: `apply(..., rngs={"dropout": key})`; or `deterministic=True`.
        """
        return self._logits(ids, deterministic)[0]

    def loss(
        self,
        ids: jax.Array,
        labels: jax.Array,
        where: jax.Array | None = None,
        deterministic: bool = False,
    ) -> jax.Array:
        """Return the cross entropy of labels `(batch, positions)`, the mean of where it counts."""
        logits, balance = self._logits(ids, deterministic)
        loss = F.cross_entropy(logits, labels, mult=self.config.loss_softmax_mult, where=where)
        return loss if balance is None else loss + self.balance_mult * balance

    def _logits(self, ids: jax.Array, deterministic: bool) -> tuple[jax.Array, jax.Array | None]:
        x = self.dropout(self.embed(ids), deterministic)
        x, balance = self._run(x, deterministic)
        x = self.norm(x)
        return (self.embed.attend(x) if self.tie_embeddings else self.readout(x)), balance

    def _run(self, x: jax.Array, deterministic: bool) -> tuple[jax.Array, jax.Array | None]:
        """Apply the layers, and add up their losses for balance."""

        def apply(layer: Any, x: jax.Array, taus: Any) -> tuple[jax.Array, jax.Array | None]:
            return _modules.with_balance(layer(x, taus, deterministic))

        if self.remat:
            apply = linen.remat(apply, **_modules.remat_options(self.remat, self.scan_layers))
        if not self.scan_layers:
            layers: Any = self.layers
            balances = []
            for layer in layers:
                x, balance = apply(layer, x, None)
                balances.append(balance)
            return x, _modules.total_balance(balances)
        scan = linen.scan(
            apply,
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True},
        )
        x, balances = scan(self.layers, x, jnp.asarray(self.taus))
        return x, _modules.total_balance(balances)
