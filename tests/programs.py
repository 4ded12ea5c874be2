"""Programs at scales of several kinds, eagerly and compiled, beside the plain ones."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np

import jax_scalify as jsa
from tests.helpers import in_one_program, values

DTYPES = ["float32", "bfloat16", "float16"]
KINDS = ["dynamic", "frozen", "per_axis"]


def scaled(values, scale=1.0, dtype="float32", kind="dynamic"):
    """Make an array of some values at a scale, the data `values / scale`."""
    values = np.asarray(values, np.float64)
    if kind == "frozen":
        return jsa.ScaledArray(jnp.asarray(values / scale, dtype), float(scale))
    shape = np.shape(values)[:1] + (1,) * (values.ndim - 1) if kind == "per_axis" else ()
    return jsa.ScaledArray(jnp.asarray(values / scale, dtype), jnp.full(shape, scale, jnp.float32))


def rows(values, scale=1.0, dtypes=DTYPES, kinds=KINDS):
    """An operand of each dtype and kind, with its dtype."""
    return [((scaled(values, scale, d, k),), d) for d in dtypes for k in kinds]


def all_outcomes(function, operands):
    """Run a function on each tuple of operands: as it is, and all of them in one program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = jsa.scalify(function)
        eager = [function(*row) for row in operands]
        return values([eager, in_one_program(function, operands)])


def outcomes(function, *operands):
    """Run a function as it is and jitted."""
    return [results[0] for results in all_outcomes(function, [operands])]


def check(function, *operands, dtype="float32"):
    """Compare with the plain function in float32: equal up to the rounding of the dtype."""
    check_rows(function, [(operands, dtype)])


def check_rows(function, rows):
    """Compare with the plain function in float32, for operands and the dtype of each row."""
    plain = [[jsa.asarray(x, jnp.float32) for x in operands] for operands, _ in rows]
    expected = [jax.tree.leaves(function(*operands)) for operands in plain]
    for results in all_outcomes(function, [operands for operands, _ in rows]):
        for result, wanted, (operands, dtype) in zip(results, expected, rows, strict=True):
            tolerance = 8 * float(jnp.finfo(dtype).eps)
            for got, want in zip(jax.tree.leaves(result), wanted, strict=True):
                want = np.asarray(want, np.float64)
                np.testing.assert_allclose(got, want, tolerance, err_msg=str(operands))
