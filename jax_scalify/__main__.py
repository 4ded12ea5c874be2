"""`python -m jax_scalify`: what one pastes into a bug report."""

import argparse
import os
import platform
from importlib import metadata

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

import jax_scalify as jsa
from jax_scalify.interpreter.registry import registered_rules

_PACKAGES = ("jax", "jaxlib", "ml_dtypes", "numpy", "flax", "optax", "equinox", "orbax-checkpoint")
_VARIABLES = ("JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "XLA_FLAGS")
_FORMATS = {"E4M3": jnp.float8_e4m3fn, "E5M2": jnp.float8_e5m2}
_SIZE = 128  # of the matrices of a trial


def describe_versions() -> list[str]:
    """Return a line for Python, for every package that matters, and for variables that are set."""
    lines = [
        f"jax_scalify {jsa.__version__}",
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}",
    ]
    for name in _PACKAGES:
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return lines + [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]


def describe_devices() -> list[str]:
    """Return a line for each kind of device."""
    kinds = [f"{device.platform}: {device.device_kind}" for device in jax.devices()]
    return [f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)]


def describe_rules() -> list[str]:
    """Return how many primitives have a scale rule, and which of JAX's have none."""
    rules = registered_rules()
    lost = sum(rule.dequantises is not None for rule in rules)
    known = {rule.name for rule in rules}
    of_jax = [p for p in vars(jex_core.primitives).values() if isinstance(p, jex_core.Primitive)]
    missing = sorted({p.name for p in of_jax} - known)
    return [
        f"{len(rules)} primitives have a scale rule; {lost} of them lose scales, and say so",
        "exported by this JAX without one: " + (", ".join(missing) or "none"),
    ]


def describe_fp8() -> list[str]:
    """Return for each pair of FP8 formats what this machine multiplies them with."""
    lines = []
    for pair in (("E4M3", "E4M3"), ("E4M3", "E5M2"), ("E5M2", "E4M3"), ("E5M2", "E5M2")):
        lhs, rhs = (jnp.ones((_SIZE, _SIZE), _FORMATS[name]) for name in pair)
        try:
            report = jsa.numerics.check_fp8(_multiply, lhs, rhs)
            (row,) = report.rows
            how = "FP8" if row.is_fp8 else "emulated" if row.is_fp8 is False else "not known"
            text = f"{how} ({row.kernel})"
        except Exception as error:  # a backend may refuse a format
            text = f"refused: {(str(error).splitlines() or [type(error).__name__])[0]}"
        lines.append(f"{' × '.join(pair)} matmul: {text}")
    return lines


def _multiply(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jax.lax.dot(lhs, rhs, preferred_element_type=jnp.float32)


def main() -> None:
    """Print versions, devices, rules, and which FP8 matmuls run as such."""
    argparse.ArgumentParser(prog="python -m jax_scalify", description=main.__doc__).parse_args()
    for describe in (describe_versions, describe_devices, describe_rules, describe_fp8):
        print(*describe(), "", sep="\n")


if __name__ == "__main__":
    main()
