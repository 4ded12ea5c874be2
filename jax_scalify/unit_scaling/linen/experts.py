"""A mixture of experts of unit scale for Flax linen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jax_scalify.unit_scaling import _modules
from jax_scalify.unit_scaling.linen.layers import with_role


class MoEMLP(linen.Module):
    """A mixture of MLPs: each token goes through the k experts that a router chooses for it.

    A result is the tokens' and the loss of `us.functional.load_balancing_loss`, which belongs, with
    a coefficient, to the loss of the model.

    The router is an output weight of µP: from the width, which grows, to the experts, which do not.
    Its role is "output", its logits are `router_mult * x @ router / width`, of the size 1/√width at
    initialisation, and its updates move them as far at every width. Weights of experts are those of
    hidden layers; each gets gradients of the tokens that have chosen it only.

    Attributes:
        num_experts: how many MLPs there are.
        hidden: width between their layers, by default `4 * width`.
        k: number of experts for each token.
        normalize: whether the weights of a token's experts, before they are scaled, add up to 1.
        router_mult: of the operand of the router's softmax.
        act_mult: of the operand of SwiGLU's sigmoid.
        fp8: whether `up` and `gate` multiply in FP8; `down`, which is critical, and the router do
            not.
        depth: layers of the residual stack that it is in, or None.
        dtype, param_dtype: as of `Linear`.

    Raises:
        ValueError: when it is applied, if `k` is not in `[1, num_experts]`, or 1 with `normalize`.

    Source: Fedus et al., *Switch Transformers* (2021); Jiang et al., *Mixtral of Experts* (2024);
    Yang et al., *Tensor Programs V* (2022), table 8, for output weights.

    Examples:
        >>> from jax_scalify.unit_scaling import linen
        >>> layer = linen.MoEMLP(num_experts=4)
        >>> run = jax.eval_shape(layer.init_with_output, jax.random.key(0), jnp.ones((2, 3, 8)))
        >>> (out, balance), variables = run
        >>> out.shape, balance.shape, variables["params"]["up"].role
        ((2, 3, 8), (), Role(name='weight', fan_in=8, depth=None))
    """

    num_experts: int
    hidden: int | None = None
    k: int = 2
    normalize: bool = True
    router_mult: float = 1.0
    act_mult: float = 1.0
    fp8: bool = False
    depth: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Map `(..., width)` to the same shape, and a scalar, the loss for balance."""
        _modules.check_experts(self.num_experts, self.k, self.normalize)
        width, experts = x.shape[-1], self.num_experts
        hidden = 4 * width if self.hidden is None else self.hidden

        def kernel(name: str, role: str, *shape: int) -> Any:
            init = with_role(jax.nn.initializers.normal(1.0), role, shape[-2], self.depth)
            return self.param(name, init, shape, self.param_dtype)

        kernels = (
            kernel("router", "output", width, experts),
            kernel("up", "weight", experts, width, hidden),
            kernel("gate", "weight", experts, width, hidden),
            kernel("down", "weight", experts, hidden, width),
        )
        mults = (self.router_mult, self.act_mult)
        return _modules.mixture(x, kernels, self.k, *mults, self.normalize, self.fp8, self.dtype)
