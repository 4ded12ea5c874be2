"""Transformers of unit scale for Flax NNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_scalify.unit_scaling import _modules
from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling.nnx import running
from jax_scalify.unit_scaling.nnx.experts import MoEMLP
from jax_scalify.unit_scaling.nnx.layers import Dropout, Embed, Linear, LinearReadout, RMSNorm
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

    Source: Blake et al., *u-µP* (2024), section 4.2 and appendix B.

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
        dtype, param_dtype, rngs: as of `Linear`.

    Raises:
        ValueError: if the heads cannot share the width, or heads of queries those of keys.

    Source: Blake et al., *u-µP* (2024), section 4.2 and appendix B; Ainslie et al., *GQA* (2023);
    Henry et al., *Query-Key Normalization* (2020).

    Examples:
        >>> from flax.nnx import Rngs
        >>> from jax_scalify.unit_scaling import nnx
        >>> nnx.MHSA(8, 2, num_kv_heads=1, rngs=Rngs(0))(jnp.ones((1, 3, 8))).shape
        (1, 3, 8)
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        is_causal: bool = True,
        window: int | tuple[int, int] | None = None,
        rope: bool = True,
        qk_norm: bool = False,
        softmax_mult: float = 1.0,
        fp8: bool = False,
        depth: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        groups = _modules.check_heads(width, num_heads, num_kv_heads, rope)
        d_head = width // num_heads
        options: dict[str, Any] = dict(depth=depth, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.query = Linear(width, width, fp8=fp8, **options)
        # No constraint: see `_modules.attend`.
        self.key = Linear(width, groups * d_head, fp8=fp8, constraint=None, **options)
        self.value = Linear(width, groups * d_head, fp8=fp8, constraint=None, **options)
        self.out = Linear(width, width, **options)
        weight: dict[str, Any] = dict(use_scale=True, depth=depth, param_dtype=param_dtype)
        self.query_norm = RMSNorm(d_head, **weight) if qk_norm else None
        self.key_norm = RMSNorm(d_head, **weight) if qk_norm else None
        self.num_heads, self.num_kv_heads = num_heads, groups
        self.is_causal, self.window, self.rope = is_causal, window, rope
        self.softmax_mult = softmax_mult

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(batch, positions, width)` to the same shape."""
        q = _modules.heads_of(self.query(x), self.num_heads)
        k, v = (_modules.heads_of(f(x), self.num_kv_heads) for f in (self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        options = dict(is_causal=self.is_causal, window=self.window, mult=self.softmax_mult)
        return self.out(_modules.attend(q, k, v, self.rope, **options))


class TransformerLayer(nnx.Module):
    """Attention and MLP as residual branches, each behind an RMS norm.

    Args:
        width: of input and output.
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
        rngs: for the parameters, of the stream `params`, and for dropout, of `dropout`.

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
        num_kv_heads: int | None = None,
        is_causal: bool = True,
        window: int | tuple[int, int] | None = None,
        rope: bool = True,
        qk_norm: bool = False,
        taus: tuple[float, float] = (1.0, 1.0),
        config: UmupConfig = UmupConfig(),  # noqa: B008
        num_experts: int | None = None,
        experts_per_token: int = 2,
        dropout_rate: float = 0.0,
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
            width,
            num_heads,
            num_kv_heads=num_kv_heads,
            is_causal=is_causal,
            window=window,
            rope=rope,
            qk_norm=qk_norm,
            softmax_mult=config.attn_softmax_mult,
            **options,
        )
        self.mlp_norm = RMSNorm(width)
        options["act_mult"] = config.ffn_act_mult
        if num_experts is None:
            self.mlp = MLP(width, hidden, **options)
        else:
            routing: dict[str, Any] = dict(k=experts_per_token, normalize=experts_per_token > 1)
            self.mlp = MoEMLP(width, num_experts, hidden, **routing, **options)
        self.dropout = Dropout(dropout_rate, rngs=rngs) if dropout_rate else None
        self.taus = taus

    def __call__(self, x: jax.Array, taus: Any = None) -> Any:
        """Map `(batch, positions, width)` to the same shape; `taus`, if given, are used instead.

        With experts it returns that and their loss for balance.
        """
        attention_tau, mlp_tau = self.taus if taus is None else taus
        x = F.residual_apply(
            lambda x: self._dropped(self.attention(self.attention_norm(x))), x, attention_tau
        )
        branch, skip = F.residual_split(x, mlp_tau)
        out, balance = _modules.with_balance(self.mlp(self.mlp_norm(branch)))
        x = F.residual_add(self._dropped(out), skip, mlp_tau)
        return x if balance is None else (x, balance)

    def _dropped(self, x: jax.Array) -> jax.Array:
        return x if self.dropout is None else self.dropout(x)


class TransformerDecoder(nnx.Module):
    """The Llama of u-µP: embedding, layers, RMS norm, readout.

    Args:
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
            first axis and which `jax.lax.scan` runs `num_layers` times. Roles, and for one seed the
            numbers, are those of separate layers.
        remat: whether a layer's values are computed again in the backward pass, instead of kept; or
            a policy of `jax.checkpoint` that says which.
        fp8: whether the matmuls that are not critical are in FP8: those that make queries, keys and
            values, and those into the MLPs.
        dtype: of the computation, by default that of the parameters.
        param_dtype: of the parameters.
        rngs: for the parameters, of the stream `params`, and for dropout, of `dropout`.

    Raises:
        ValueError: if the heads cannot share the width, or there are no layers to scan.

    Source: Blake et al., *u-µP* (2024), section 4.

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
        num_kv_heads: int | None = None,
        window: int | tuple[int, int] | None = None,
        qk_norm: bool = False,
        tie_embeddings: bool = False,
        num_experts: int | None = None,
        experts_per_token: int = 2,
        balance_mult: float = 0.01,
        config: UmupConfig = UmupConfig(),  # noqa: B008
        residuals: ResidualScheme | None = None,
        dropout_rate: float = 0.0,
        scan_layers: bool = False,
        remat: bool | Callable[..., bool] = False,
        fp8: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.embed = Embed(vocab_size, width, tied=tie_embeddings, **options)
        self.taus = _modules.branch_taus(config, residuals, num_layers)
        branches: dict[str, Any] = dict(
            num_kv_heads=num_kv_heads,
            window=window,
            qk_norm=qk_norm,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            config=config,
            dropout_rate=dropout_rate,
            fp8=fp8,
            depth=num_layers,
            **options,
        )
        if scan_layers:
            _modules.check_scan(num_layers)
            layers = [TransformerLayer(width, num_heads, hidden, **branches) for _ in self.taus]
            self.layers = running.stack(layers)
        else:
            self.layers = nnx.List(
                TransformerLayer(width, num_heads, hidden, taus=taus, **branches)
                for taus in self.taus
            )
        self.norm = RMSNorm(width)
        self.readout = None if tie_embeddings else LinearReadout(width, vocab_size, **options)
        self.dropout = Dropout(dropout_rate, rngs=rngs) if dropout_rate else None
        self.config, self.balance_mult = config, balance_mult
        self.scan_layers, self.remat = scan_layers, remat

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Map integers `(batch, positions)` to logits `(batch, positions, vocab_size)`."""
        return self._logits(ids)[0]

    def loss(self, ids: jax.Array, labels: jax.Array, where: jax.Array | None = None) -> jax.Array:
        """Return the cross entropy of labels `(batch, positions)`, the mean of where it counts."""
        logits, balance = self._logits(ids)
        loss = F.cross_entropy(logits, labels, mult=self.config.loss_softmax_mult, where=where)
        return loss if balance is None else loss + self.balance_mult * balance

    def _logits(self, ids: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        x = self.embed(ids)
        x, balance = self._run(x if self.dropout is None else self.dropout(x))
        x = self.norm(x)
        return (self.embed.attend(x) if self.readout is None else self.readout(x)), balance

    def _run(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Apply the layers, and add up their losses for balance."""
        layers: Any = self.layers
        if not self.scan_layers:
            balances = []
            for layer in layers:
                x, balance = _modules.with_balance(running.apply(layer, x, self.remat))
                balances.append(balance)
            return x, _modules.total_balance(balances)
        x, balances = running.scan(layers, x, jnp.asarray(self.taus), self.remat)
        return x, _modules.total_balance(balances)
