"""The hyperparameters of u-µP."""

from __future__ import annotations

import dataclasses

from jax_scalify.unit_scaling.functional._common import positive
from jax_scalify.unit_scaling.residuals import ResidualScheme, umup_residuals


@dataclasses.dataclass(frozen=True, kw_only=True)
class UmupConfig:
    """The multipliers of u-µP, besides the learning rate; each is 1 unless a sweep tells better.

    Attributes:
        attn_softmax_mult: of the operand of attention's softmax.
        ffn_act_mult: of the operand of the sigmoid in SwiGLU.
        residual_mult: of all residual branches together, to the embedding.
        residual_attn_ratio: of the branches of attention to those of MLPs.
        loss_softmax_mult: of the operand of the loss's softmax.

    Raises:
        TypeError: if one is no number.
        ValueError: if one is not positive and finite.

    Source: Blake et al., *u-µP* (2024), table 3.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.UmupConfig(residual_mult=0.5).residuals()(0, 2)
        0.5
    """

    attn_softmax_mult: float = 1.0
    ffn_act_mult: float = 1.0
    residual_mult: float = 1.0
    residual_attn_ratio: float = 1.0
    loss_softmax_mult: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no multiplier."""
        for field in dataclasses.fields(self):
            positive(field.name, getattr(self, field.name), "UmupConfig")

    def residuals(self) -> ResidualScheme:
        """Return the scheme of residual branches, as `umup_residuals` makes it."""
        return umup_residuals(self.residual_mult, self.residual_attn_ratio)
