"""A mixture of experts of unit scale for Flax NNX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_scalify.unit_scaling import _modules
from jax_scalify.unit_scaling.roles import Role


class MoEMLP(nnx.Module):
    """A mixture of MLPs: each token goes through the k experts that a router chooses for it.

    A result is the tokens' and the loss of `us.functional.load_balancing_loss`, which belongs, with
    a coefficient, to the loss of the model.

    The router is an output weight of µP: from the width, which grows, to the experts, which do not.
    Its role is "output", its logits are `router_mult * x @ router / width`, of the size 1/√width at
    initialisation, and its updates move them as far at every width. Weights of experts are those of
    hidden layers; each gets gradients of the tokens that have chosen it only.

    Args:
        width: of input and output.
        num_experts: how many MLPs there are.
        hidden: width between their layers, by default `4 * width`.
        k: number of experts for each token.
        normalize: whether the weights of a token's experts, before they are scaled, add up to 1.
        router_mult: of the operand of the router's softmax.
        act_mult: of the operand of SwiGLU's sigmoid.
        fp8: whether `up` and `gate` multiply in FP8; `down`, which is critical, and the router do
            not.
        depth: layers of the residual stack that it is in, or None.
        dtype, param_dtype, rngs: as of `Linear`.

    Raises:
        ValueError: if `k` is not in `[1, num_experts]`, or is 1 with `normalize`.

    Source: Fedus et al., *Switch Transformers* (2021); Jiang et al., *Mixtral of Experts* (2024);
    Yang et al., *Tensor Programs V* (2022), table 8, for output weights.

    Examples:
        >>> from flax.nnx import Rngs
        >>> from jax_scalify.unit_scaling import nnx
        >>> layer = nnx.MoEMLP(8, num_experts=4, hidden=8, rngs=Rngs(0))
        >>> layer.router.role
        Role(name='output', fan_in=8, depth=None)
        >>> out, balance = jax.eval_shape(layer, jnp.ones((2, 3, 8)))
        >>> out.shape, balance.shape
        ((2, 3, 8), ())
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        hidden: int | None = None,
        *,
        k: int = 2,
        normalize: bool = True,
        router_mult: float = 1.0,
        act_mult: float = 1.0,
        fp8: bool = False,
        depth: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        _modules.check_experts(num_experts, k, normalize)
        hidden = 4 * width if hidden is None else hidden

        def kernel(role: str, *shape: int) -> nnx.Param:
            array = jax.random.normal(rngs.params(), shape, param_dtype)
            return nnx.Param(array, role=Role(role, shape[-2], depth))

        self.router = kernel("output", width, num_experts)
        self.up = kernel("weight", num_experts, width, hidden)
        self.gate = kernel("weight", num_experts, width, hidden)
        self.down = kernel("weight", num_experts, hidden, width)
        self.k, self.normalize, self.fp8, self.dtype = k, normalize, fp8, dtype
        self.router_mult, self.act_mult = router_mult, act_mult

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Map `(..., width)` to the same shape, and a scalar, the loss for balance."""
        kernels = (self.router[...], self.up[...], self.gate[...], self.down[...])
        mults = (self.router_mult, self.act_mult)
        return _modules.mixture(x, kernels, self.k, *mults, self.normalize, self.fp8, self.dtype)
