"""The table of rule cases on a mesh of explicit axes: values and shardings are plain JAX's.

Each operand is cut along each of its axes in turn. The number of devices is fixed when JAX starts,
so the cases run in one process of their own.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.arrays.scaled_array import is_scaled
from tests.cases import CASES

DEVICES = 8
WAYS = ("dynamic", "static", "axis", "grad")
ONE_IN = 32  # of cases, operands, axes and ways, without `--full`
# What XLA for CPUs does wrong there, of plain JAX in float32 or complex64 as well.
XLA_IS_WRONG = {
    "reduce_window_min, grad, operand 0, axis 1": "another element of a cut window is chosen",
    "fft-FFT, grad, operand 0, axis 1": "it gives an FFT a layout that it refuses",
    "fft-IFFT, grad, operand 0, axis 1": "the same",
    "fft-IRFFT, grad, operand 0, axis 1": "the same",
}


def gradient_of(case, floats):
    """The gradient of a sum of sizes, by all floating operands."""

    def total(*args):
        leaves = [
            y for y in jax.tree.leaves(case.fun(*args)) if jnp.issubdtype(y.dtype, jnp.inexact)
        ]
        return sum(jnp.sum(jnp.abs(y)).astype(jnp.float32) for y in leaves)

    return jax.grad(total, argnums=tuple(floats))


def scaled(x, way):
    """An operand of scale 1, in the way that it has one."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if way == "static":
        return ScaledArray(x, 1.0)
    if way == "axis" and x.ndim > 1:
        return ScaledArray(x, jnp.ones((x.shape[0], *(1,) * (x.ndim - 1)), jnp.float32))
    return ScaledArray(x, jnp.float32(1))


def spec_of(x):
    spec = tuple(jax.typeof(x).sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def difference(fun, args, way):
    """What differs from plain JAX, or None; also where that refuses the operands."""
    try:
        want = jax.tree.leaves(jax.jit(fun)(*args))
    except Exception:
        return None
    got = jax.jit(jsa.scalify(fun))(*(scaled(x, way) for x in args))
    for g, w in zip(jax.tree.leaves(got, is_leaf=is_scaled), want, strict=True):
        data = g.data if is_scaled(g) else g
        if spec_of(data) != spec_of(w):
            return f"sharded {spec_of(data)}, not {spec_of(w)}"
        g, w = (np.asarray(jsa.asarray(x)).astype(np.complex128) for x in (g, w))
        if not np.allclose(g, w, rtol=5e-2, atol=5e-2, equal_nan=True):
            return f"off by {np.max(np.abs(g - w))}"
    return None


def runs():
    """Every case with an operand cut along an axis, in every way: a name, function and operands."""
    for number, case in enumerate(CASES):
        operands = [jnp.asarray(x) for x in case.operands(case.dtypes[number % len(case.dtypes)])]
        floats = [k for k, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]
        for cut, operand in enumerate(operands):
            for axis in range(operand.ndim):
                if operand.shape[axis] % 2 or not operand.shape[axis]:
                    continue
                for way in WAYS:
                    if way == "grad" and not (case.grad and floats):
                        continue
                    fun = gradient_of(case, floats) if way == "grad" else case.fun
                    specs = [[None] * x.ndim for x in operands]
                    specs[cut][axis] = "data"
                    yield (
                        f"{case.name}, {way}, operand {cut}, axis {axis}",
                        fun,
                        operands,
                        specs,
                        way,
                    )


def main(one_in):
    """Run the cases; print what differs, as JSON."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_disable_most_optimizations", True)
    assert len(jax.devices()) == DEVICES
    failures, count = {}, 0
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (name, fun, operands, specs, way) in enumerate(runs()):
            if number % one_in or name in XLA_IS_WRONG:
                continue
            args = [jax.device_put(x, P(*spec)) for x, spec in zip(operands, specs, strict=True)]
            count += 1
            try:
                failure = difference(fun, args, way)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            if failure:
                failures[name] = failure
    print(json.dumps({"count": count, "failures": failures}))


@pytest.mark.parametrize("one_in", [ONE_IN, pytest.param(1, marks=pytest.mark.full)])
def test_values_and_shardings(one_in):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.rules.test_explicit_mesh", str(one_in)],
        env={**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["count"] > 1000 / one_in
    assert not found["failures"], "\n".join(f"{k}: {v}" for k, v in found["failures"].items())


if __name__ == "__main__":
    main(int(sys.argv[1]))
