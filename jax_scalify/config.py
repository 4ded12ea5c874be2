"""The configuration of the transform."""

from __future__ import annotations

import dataclasses
import enum
import threading
from typing import Any, Literal

import jax
import jax.numpy as jnp


class Pow2RoundMode(enum.Enum):
    """The rounding of a statistic, or of the growth of a sum, to a power of two."""

    NONE = "none"
    DOWN = "down"
    UP = "up"
    STOCHASTIC = "stochastic"


_SUPPORTED_MODES = (Pow2RoundMode.DOWN, Pow2RoundMode.UP)
_SUM_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.float8_e5m2))
_MISSING_RULE = ("warn", "error", "silent")

# The value of a `jax.make_user_context` is part of every `jax.jit` cache key.
_active = jax.make_user_context(default_value=None)
_entered = threading.local()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalifyConfig:
    """Options of `scalify`. Also a context manager that sets them for the calls inside it.

    Attributes:
        rounding_mode: the rounding of statistics and of the growth of sums to powers of two, `DOWN`
            or `UP`.
        scale_dtype: dtype of all dynamic scales, float32 or float64.
        missing_rule: what happens if a primitive has no scale rule. "warn": evaluate it on
            dequantised values and warn once. "error": raise `MissingRuleError`. "silent": evaluate
            it on dequantised values.
        sum_dtype: dtype in which matmuls store sums and devices exchange them. By default, 16 bits
            for results in 16 bits where this is safe. It moves fewer bytes through memory and
            between devices, which sum the gradients of bfloat16 and FP8 matmuls in bfloat16.
            float32: float32 wherever 16 bits are the default. float8_e5m2: E5M2 for gradients that
            `psum` and `psum_scatter` add up in a `shard_map`. A sum counts as one of gradients if
            its array has two axes or more and is not part of a forward pass. Each device's part is
            rounded to E5M2 once and added in float32.

    Raises:
        TypeError: if `scale_dtype` is not float32 or float64, or `sum_dtype` is not float32,
            float8_e5m2 or None.
        ValueError: if `missing_rule` is unknown, or if scales would not stay powers of two
            (`Pow2RoundMode.NONE`) or would depend on a random key (`Pow2RoundMode.STOCHASTIC`).

    Example:
        >>> import jax_scalify as jsa
        >>> with jsa.ScalifyConfig(missing_rule="error"):
        ...     y = jsa.scalify(jnp.square)(jsa.as_scaled_array(jnp.array([1.0, 2.0])))
        >>> print(jsa.asarray(y))
        [1. 4.]
    """

    rounding_mode: Pow2RoundMode = Pow2RoundMode.DOWN
    scale_dtype: Any = jnp.float32
    missing_rule: Literal["warn", "error", "silent"] = "warn"
    sum_dtype: Any = None

    def __post_init__(self) -> None:
        if self.rounding_mode not in _SUPPORTED_MODES:
            raise ValueError(
                f"`rounding_mode` must be one of {[str(m) for m in _SUPPORTED_MODES]}, got "
                f"{self.rounding_mode!r}: scales have to stay powers of two."
            )
        if self.missing_rule not in _MISSING_RULE:
            raise ValueError(
                f"`missing_rule` must be one of {list(_MISSING_RULE)}, got {self.missing_rule!r}."
            )
        if self.scale_dtype is None or jnp.dtype(self.scale_dtype) not in (
            jnp.float32,
            jnp.float64,
        ):
            raise TypeError(
                f"`scale_dtype` must be float32 or float64, got {self.scale_dtype!r}: float16 "
                "and bfloat16 cannot hold the exponents that products of scales have."
            )
        if self.sum_dtype is not None:
            known = [d for d in _SUM_DTYPES if self.sum_dtype in (d, d.name, d.type)]
            if not known:
                names = " or ".join(d.name for d in _SUM_DTYPES)
                raise TypeError(f"`sum_dtype` must be {names}, or None, got {self.sum_dtype!r}.")
            object.__setattr__(self, "sum_dtype", known[0])
        object.__setattr__(self, "scale_dtype", jnp.dtype(self.scale_dtype))

    def __enter__(self) -> ScalifyConfig:
        context = _active(self)
        context.__enter__()
        _entered.__dict__.setdefault("stack", []).append(context)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _entered.stack.pop().__exit__(*exc_info)


_DEFAULT = ScalifyConfig()


def current_config() -> ScalifyConfig:
    """Return the configuration of the innermost `with ScalifyConfig(...)`."""
    return _active.value or _DEFAULT
