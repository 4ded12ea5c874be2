"""Runs a program plainly and scalified, and compares.

The reference is the plain program in float64 on the values that the inputs hold. What is got is
right where it is near to that. Near means within `_TOLERANCE` units of the dtype's epsilon, of the
leaf's largest magnitude; of a gradient, also of 1e-3 of the largest gradient, where gradients are
in units of their input. What is further off is looked at again:

- It is right where it is as near to what *plain* JAX gives, in float32 and, if they hold the values
  of the inputs that the result depends on, in the program's dtypes. So functions that read the
  dtype (`nan_to_num`) are compared with themselves.
- It may be off by `_FACTOR` times what *plain* JAX is off, or what rounding noise does to the
  reference (`tests/fuzz/noise.py`). What is sensitive (sums that cancel, comparisons of equals,
  indices of a sort) is so found to be, element by element. Integers and bools may be what noise
  makes of them. Results whose elements are only moved (`catalogue.MOVES`) hold what they held.
- An element of a loop's result that noise changes by more than itself, or makes inf or nan, is not
  compared: what saturates in one step is a wrong number in the next.
- Where plain JAX or noise is not finite, inf is right, so is what float16 saturates at, and so is
  the true number; nan is right where one of them is nan. A wrong finite number is not, unless noise
  always makes it nan or inf.
- Powers of data that lies beside its scale may lie beyond float16 where the value does not: the
  fourth power of `2**8` at `2**-8` is data of `2**32`, the fourth power of a fourth power, in a
  loop, is that of all data that is not near 1. Such programs are not compared.
- `jnp.poly` multiplies arrays in which a constant, 1, lies beside the elements of another, again
  and again. In float16 the constants lie up to 13 octaves above their arrays' scales, and so their
  products beyond float16. A wrong result of it in float16 is not compared either.

The stored data is what counts: an input is its data times its scale.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_scalify as jsa
from jax_scalify.arrays.scaled_array import is_scaled
from tests.fuzz.noise import ROUNDED, RUNS, noisy_runs
from tests.fuzz.programs import Discarded, Program, check_plain, load

_TOLERANCE = 4.0
_FACTOR = 4.0
_LOOPS = ("scan", "while")
_EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclasses.dataclass(frozen=True)
class Failure:
    """What is wrong with a program.

    Attributes:
        kind: "raises", "dtype" or "value".
        detail: the message, for people.
        leaf: number of the result.
    """

    kind: str
    detail: str
    leaf: int = 0


def check(program: Program) -> Failure | None:
    """Run a program, and return what is wrong with it.

    Raises:
        Discarded: if plain JAX refuses the program, or cannot run it in another dtype.
    """
    avals = check_plain(program)
    try:
        results, values = run_scalified(program)
        got = [np.asarray(g) for g in jax.tree.leaves(values) if g.dtype != jax.dtypes.float0]
    except Exception as error:
        run_plain(program)
        message = re.sub(r"\s+", " ", str(error))[:500]
        return Failure("raises", f"{type(error).__name__}: {message}")
    leaves = jax.tree.leaves(results, is_leaf=is_scaled)
    leaves = [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0]
    for k, (leaf, aval) in enumerate(zip(leaves, avals, strict=True)):
        if leaf.shape != aval.shape or leaf.dtype != aval.dtype:
            return Failure(
                "dtype", f"{leaf.dtype}{leaf.shape}, plain JAX {aval.dtype}{aval.shape}", k
            )
    return _compare(program, got, avals)


def run_scalified(program: Program) -> Any:
    """The results of the scalified program, and their values in float32."""

    def run(*arguments: Any) -> Any:
        results = jsa.scalify(load(program.definitions()))(*arguments)
        return results, jsa.asarray(results, jnp.float32)

    return (jax.jit(run) if program.jitted else run)(*(i.argument() for i in program.inputs))


def _leaves(result: Any) -> list[np.ndarray]:
    arrays = [np.asarray(r) for r in jax.tree.leaves(result) if r.dtype != jax.dtypes.float0]
    return [a if a.dtype.kind in "iub" else a.astype(np.float64) for a in arrays]


def _with_floats(program: Program, dtype: str) -> str:
    """Source of a program in which all floats have one dtype."""
    return re.sub(r"jnp\.(float32|float16|bfloat16)\b", f"jnp.{dtype}", program.definitions())


def run_plain(program: Program, dtype: str = "") -> list[np.ndarray]:
    """The results of the plain program in its own dtypes, or with floats of one dtype.

    Raises:
        Discarded: if XLA refuses it.
    """
    source = _with_floats(program, dtype) if dtype else program.definitions()
    with jax.enable_x64(dtype == "float64"):
        values = [
            jnp.asarray(i.value(), (dtype or i.dtype) if i.is_float else None)
            for i in program.inputs
        ]
        try:
            return _leaves(jax.jit(load(source))(*values))
        except Exception as error:
            raise Discarded(str(error)) from error


def _leaves_float16(program: Program) -> bool:
    """Tell whether float16 does not hold what is computed of the data, were all scales 1."""
    if "float16" not in program.dtypes():
        return False
    # The first outputs are what a loop carries on.
    outputs = (*program.outputs, *(s.target for s in program.statements))
    if program.wrapper in _LOOPS:
        everything = dataclasses.replace(program, outputs=outputs, wrapper="scan")
        inputs = tuple(dataclasses.replace(i, scale=None) for i in program.inputs)
    else:
        everything = dataclasses.replace(program, outputs=outputs, wrapper="plain")
        inputs = tuple(
            dataclasses.replace(
                i, data=i.data[0] if i.stacked else i.data, scale=None, stacked=False
            )
            for i in program.inputs
        )
    results = run_plain(dataclasses.replace(everything, inputs=inputs), "float64")
    sizes = [np.abs(r[np.isfinite(r)]) for r in results if r.dtype.kind == "f"]
    own = any(np.ndim(i.scale) for i in program.inputs if i.scale is not None)
    if own or any("cumprod(" in s.source for s in program.statements):  # powers from 1 on
        least = [size.min(initial=1, where=size > 0) for size in sizes]
    else:
        least = [size.max(initial=0) for size in sizes]
    return any(size.max(initial=0) > 2.0**15 for size in sizes) or any(
        0 < size < 2.0**-14 for size in least
    )


def run_noisy(program: Program) -> list[list[np.ndarray]]:
    """The results in float64, with noise on what is computed; one list of leaves a run."""
    source = _with_floats(program, "float64")
    dtypes = program.dtypes()
    with jax.enable_x64(True):
        values = [jnp.asarray(i.value()) for i in program.inputs]
        eps = max(_EPS[d] for d in dtypes)
        runs = noisy_runs(load(source), values, eps, "float16" in dtypes, RUNS)
        return [_leaves(leaves) for leaves in runs]


def _compare(program: Program, got: list[np.ndarray], avals: tuple[Any, ...]) -> Failure | None:
    want = run_plain(program, "float64")
    limits = _limits(program, want, avals)
    wrong = [_off(g, w, limit) for g, w, limit in zip(got, want, limits, strict=True)]
    if not any(np.any(w) for w in wrong):
        return None
    beside = any(i.shift for i in program.inputs) or program.wrapper in _LOOPS
    if beside and _leaves_float16(program):
        raise Discarded
    if "float16" in program.dtypes() and any("jnp.poly(" in s.source for s in program.statements):
        raise Discarded
    plain = [run_plain(program, "float32")]
    held = {i.name for i in program.inputs if np.array_equal(i.value(), i.value().astype(i.dtype))}
    own = run_plain(program) if held else []
    noisy = run_noisy(program)
    for k, (g, w, limit) in enumerate(zip(got, want, limits)):
        if not np.any(wrong[k]):
            continue
        still = wrong[k]
        is_held = program.inputs_of(k, len(got)) <= held
        ways = [*plain, own] if is_held else plain
        for p in ways:
            still = still & _off(g, p[k], limit)
        others = [p[k] for p in ways + noisy]
        still = still & ~_excused(g, w, others, limit)
        if g.dtype.kind not in "iub":
            runs = [n[k] for i, n in enumerate(noisy) if i != ROUNDED]
            still = still & np.any(np.isfinite(np.stack(runs)), axis=0)
        if program.wrapper in _LOOPS:
            still = still & ~_unknown(w, others)
        if np.any(still):
            return Failure("value", _told(g, w, plain[0][k], still), k)
    return None


def _limits(program: Program, want: list[np.ndarray], avals: tuple[Any, ...]) -> list[Any]:
    """The absolute error allowed to each leaf."""
    eps = _TOLERANCE * max(_EPS[d] for d in program.dtypes())
    sizes = [_largest(w) for w in want]
    if program.wrapper in ("grad", "remat"):
        units = [max(_largest(i.value()), 2.0**-60) for i in program.inputs if i.is_float]
        whole = max(s * u for s, u in zip(sizes, units, strict=True))
        sizes = [max(s, 1e-3 * whole / u) for s, u in zip(sizes, units)]
    moved = _moved(program)
    return [0.0 if k in moved else eps * s for k, s in enumerate(sizes)]


def _moved(program: Program) -> set[int]:
    """The results whose elements are those of an input, each with the digits that it had."""
    if program.wrapper not in ("plain", "jit", "vmap") or any("[" in o for o in program.outputs):
        return set()
    computed: set[str] = set()
    for s in program.statements:
        if not s.moves or s.uses() & computed:
            computed.add(s.target)
    # A statement with several results has more leaves than outputs.
    single = len(program.outputs) == 1
    return {0} if single and program.outputs[0] not in computed else set()


def _largest(x: np.ndarray) -> float:
    if x.dtype.kind in "iub":
        return 0.0
    return float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0))


def _off(got: np.ndarray, want: np.ndarray, limit: float) -> np.ndarray:
    """Where two arrays differ."""
    if want.dtype.kind in "iub":
        return got != want
    got = got.astype(np.float64)
    with np.errstate(all="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        near = np.isfinite(got) & np.isfinite(want) & (np.abs(got - want) <= limit)
    return ~(same | near)


def _is_saturated(x: np.ndarray) -> Any:
    """Where numbers are the largest one of float16, times a power of two."""
    return np.abs(np.frexp(np.where(np.isfinite(x), x, 0))[0]) == 65504 / 65536


def _excused(got: np.ndarray, want: np.ndarray, others: list[np.ndarray], limit: float) -> Any:
    """Where other ways to compute it are as far off."""
    excused = np.zeros(got.shape, bool)
    if want.dtype.kind in "iub":
        return functools.reduce(np.logical_or, [got == o for o in others], excused)
    got = got.astype(np.float64)
    with np.errstate(all="ignore"):
        reach = [np.where(np.isfinite(o), np.abs(o - want), 0) for o in others]
        spread = _FACTOR * np.max(np.stack(reach), axis=0) + limit
        excused |= np.isfinite(got) & np.isfinite(want) & (np.abs(got - want) <= spread)
        is_infinite = np.isinf(got) | _is_saturated(got)
        excused |= is_infinite & np.any(~np.isfinite(np.stack(others)), axis=0)
        # The infinity of one way, as of 1 / 0, is the nan of another, as of 0 / 0.
        excused |= np.isnan(got) & np.any(~np.isfinite(np.stack(others)), axis=0)
        # Where the reference is not finite, a number that noise comes to is as good.
        near = [np.abs(got - o) <= _FACTOR * np.abs(o) + limit for o in others]
        excused |= ~np.isfinite(want) & np.any(np.stack(near), axis=0)
        excused |= np.isinf(got) & (np.abs(want) > 3.4e38) & (np.sign(got) == np.sign(want))
        excused |= (np.abs(got) < 2.0**-120) & (np.abs(want) < 2.0**-120)
    return excused


def _unknown(want: np.ndarray, others: list[np.ndarray]) -> Any:
    """Where no digit is left: the loop has repeated something sensitive."""
    if want.dtype.kind in "iub":
        return False
    with np.errstate(all="ignore"):
        is_near = np.stack([np.abs(o - want) <= np.abs(want) for o in others])
    return np.isfinite(want) & ~np.all(is_near, axis=0)


def _told(got: np.ndarray, want: np.ndarray, plain: np.ndarray, wrong: np.ndarray) -> str:
    with np.printoptions(precision=6, threshold=24):
        return (
            f"got {got[wrong]} where float64 gives {want[wrong]} and plain float32 {plain[wrong]}; "
            f"{int(wrong.sum())} of {wrong.size} elements"
        )
