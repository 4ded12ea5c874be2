"""What is likely to help where a value is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_scalify.arrays.scaled_array import along_leading_axes
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import is_var
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.numerics.interpreting import Step

# Of each the factor by which its result is less than that of its base, and the base.
_EXPONENTIALS = {
    "exp": (1, np.e),
    "exp2": (1, 2),
    "expm1": (1, np.e),
    "sinh": (2, np.e),
    "cosh": (2, np.e),
}
_LOGARITHMS = ("log", "log2", "log1p")
_ROOTS = ("sqrt", "rsqrt", "cbrt")
# How far back from a zero an epsilon is looked for, through these.
_FAR = 8
_KEEP_ZERO = ("sqrt", "rsqrt", "mul", "pow")


def remedy(step: Step, operands: Sequence[Any], argument: str | None, constant: bool) -> str:
    """Return a sentence for an equation at fault.

    Args:
        step: the equation.
        operands: of the equation, measured.
        argument: the name of the argument that was not finite.
        constant: whether a constant was not finite.
    """
    name = step.eqn.primitive.name
    if argument:
        return f"look at the data in `{argument}`: everything that it meets becomes nan."
    if constant:
        return _constant(operands)
    if any(o.measure is not None and (o.measure.infs or o.measure.nans) for o in operands):
        return (
            "infinities of masks cancel: a row is masked entirely. Use the `where` argument of "
            "softmax and logsumexp, or a large negative number in place of -inf."
        )
    for kind, advise in _ADVICE:
        if name in kind:
            found = advise(step, operands)
            if found:
                return found
    return _overflow(step, operands)


def _constant(operands: Sequence[Any]) -> str:
    """Of a constant that is inf: a dtype of few bits may have made it of a finite number."""
    advice = "replace the constant by a finite one, or mask what it meets."
    dtypes_of_inf = [o.dtype for o in operands if o.measure is not None and o.measure.infs]
    narrow = [d for d in dtypes_of_inf if dtypes.is_narrow(d)]
    if not narrow:
        return advice
    return (
        f"if the code says a finite number there, {narrow[0]} (largest "
        f"{float(jnp.finfo(narrow[0]).max):g}) has made it infinite, before jsa.scalify could see "
        f"it: write it as an array of float32. If it says inf, {advice}"
    )


def _largest_value(data: Any, scale: Any) -> float:
    """The largest finite number of a value, not of its data."""
    sizes = np.abs(np.asarray(data)).astype(np.float64)
    if scale is not None:
        sizes = sizes * along_leading_axes(np.asarray(scale, np.float64), sizes.ndim)
    return float(np.max(sizes, where=np.isfinite(sizes), initial=0))


def _exponential(step: Step, operands: Sequence[Any]) -> str:
    dtype, (factor, base) = step.results[0].dtype, _EXPONENTIALS[step.eqn.primitive.name]
    largest = _largest_value(step.operands[0], step.operand_scales[0])
    scale = 1.0 if step.result_scales[0] is None else float(np.max(step.result_scales[0]))
    limit = (np.log(float(jnp.finfo(dtype).max)) + np.log(factor * scale)) / np.log(base)
    return (
        f"the exponential of {largest:.3g} overflows {dtype} (at {limit:.3g}): "
        "subtract the maximum first, as jax.nn.softmax and jax.nn.logsumexp do."
    )


def _logarithm(step: Step, operands: Sequence[Any]) -> str:
    if operands[0].measure.zeros or step.eqn.primitive.name == "log1p":
        return (
            "the logarithm of 0: use log_softmax or jax.scipy.special.xlogy, or the logarithm of "
            "max(x, tiny)."
        )
    return "the logarithm of a negative number: bound its operand from below."


def _division(step: Step, operands: Sequence[Any]) -> str | None:
    divisor = operands[1].measure
    if not divisor.zeros:
        return None
    lost = lost_epsilon(step, 1)
    if lost:
        return lost
    maker = _maker(step, step.eqn.invars[1])
    by_root = maker is not None and maker.primitive.name in ("sqrt", "mul")
    if by_root and not is_var(step.eqn.invars[0]) and "jvp(" in step.path:
        return _DERIVATIVE_OF_ROOT  # 0.5 / sqrt(x)
    return (
        f"{divisor.zeros} divisors are 0: add an epsilon that {step.results[0].dtype} holds, or "
        "replace them (`jnp.where` on the divisor, not on the quotient: its gradient is nan still)."
    )


def _root(step: Step, operands: Sequence[Any]) -> str | None:
    lost = lost_epsilon(step, 0)
    if lost:
        return lost
    if step.eqn.primitive.name == "rsqrt" and operands[0].measure.zeros:
        return "the inverse root of 0: add an epsilon inside of the root."
    return "the root of a negative number: bound its operand from below by 0."


def _power(step: Step, operands: Sequence[Any]) -> str | None:
    if operands[0].measure.zeros:
        return lost_epsilon(step, 0) or (
            _DERIVATIVE_OF_ROOT if "jvp(" in step.path else _ZERO_POWER
        )
    return None


_ZERO_POWER = "a negative power of 0: add an epsilon to its base."
_DERIVATIVE_OF_ROOT = (
    "the derivative of a root at 0 is infinite, and infinity times 0 is nan: add an epsilon inside "
    "of the root, or take the root of `jnp.where(x > 0, x, 1)` and replace it after."
)


def _cast(step: Step, operands: Sequence[Any]) -> str | None:
    to, largest = step.results[0].dtype, operands[0].measure.largest
    top = float(jnp.finfo(to).max)
    if largest <= top:
        return None
    becomes = "nan" if dtypes.is_fp8(to) else "inf"
    scale = step.operand_scales[0]
    if scale is not None:
        value = _largest_value(step.operands[0], scale)
        return (
            f"the data of {value:.3g} is {largest:.3g} at its scale, beyond {to} (largest {top:g}):"
            f" it becomes {becomes}. Rescale it before the cast (jsa.dynamic_rescale), or clip it."
        )
    return (
        f"{largest:.3g} is beyond {to} (largest {top:g}), and becomes {becomes}: scale it first "
        "(jsa.as_scaled_array with 'max', jsa.fp8_matmuls), or clip it to the range."
    )


def _overflow(step: Step, operands: Sequence[Any]) -> str:
    result = step.results[0]
    top = f"{result.dtype} (largest {float(jnp.finfo(result.dtype).max):.3g})"
    if any(o.scale is not None for o in operands):
        return (
            f"the data overflows {top} at its scale: rescale an operand before "
            "(jsa.dynamic_rescale, jsa.set_scaling), or the state between steps."
        )
    return f"the result overflows {top}: compute it in float32, or use jsa.scalify."


_ADVICE = (
    (_EXPONENTIALS, _exponential),
    (_LOGARITHMS, _logarithm),
    (("div",), _division),
    (_ROOTS, _root),
    (("pow", "integer_pow"), _power),
    (("convert_element_type",), _cast),
)


def _maker(step: Step, atom: Any) -> Any:
    """The equation that makes an operand; None for a literal or an argument."""
    return step.makers.get(atom) if is_var(atom) else None


def lost_epsilon(step: Step, index: int) -> str | None:
    """Return a remedy if an operand is a sum with an epsilon that its dtype rounded to zero."""
    atom = step.eqn.invars[index]
    for _ in range(_FAR):
        maker = _maker(step, atom)
        if maker is None:
            return None
        name = maker.primitive.name
        if name in ("add", "max") and any(map(_is_lost, maker.invars)):
            dtype = maker.outvars[0].aval.dtype
            smallest = float(jnp.finfo(dtype).smallest_subnormal)
            return (
                f"the epsilon that is added is 0 in {dtype} (smallest {smallest:.1g}), before "
                "jsa.scalify could see it: take a larger one, or compute this in float32, as "
                "jsa.optim.low_precision does for optimizers."
            )
        traits = traits_of(name)
        if not (traits.is_view or traits.elements in ("same", "cast") or name in _KEEP_ZERO):
            return None
        atom = next((v for v in maker.invars if is_var(v)), None)
        if atom is None:
            return None
    return None


def _is_lost(atom: Any) -> bool:
    """Whether a literal is 0 in a dtype in which it may have been something else."""
    if is_var(atom):
        return False
    dtype: Any = atom.aval.dtype  # pyright: ignore[reportAttributeAccessIssue]
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return narrow and np.ndim(atom.val) == 0 and float(atom.val) == 0
