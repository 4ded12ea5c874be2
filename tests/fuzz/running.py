"""Runs a program plainly and scalified, and compares.

The reference is the plain program in float64 on the values that the inputs hold. What is got is
right where it is near to that. Near means within `_TOLERANCE` units of the dtype's epsilon, of the
leaf's largest magnitude; of a gradient, also of 1e-3 of the largest gradient, where gradients are
in units of their input. What is further off is looked at again:

- It is right where it is as near to what *plain* JAX gives, in float32 and, if they hold the values
  of the inputs, in the program's dtypes. So functions that read the dtype (`nan_to_num`) are
  compared with themselves.
- It may be off by `_FACTOR` times what *plain* JAX is off, or what *noise* does to the reference:
  every input and every result is changed at random by up to its dtype's epsilon, in the
  backward pass too. What is sensitive (sums that cancel, comparisons of equals, indices of a sort)
  is so found to be, element by element. Integers and bools may be what noise makes of them.
- Noise of float16 has an absolute part also, `2**-14` of the array's largest magnitude: what is
  computed with may get one scale for all its elements. What is less is 0 in every second run.
  Inputs whose elements are only moved (`catalogue.MOVES`) hold what they hold: they have none.
  Of operands that are put together (`catalogue.JOINS`) the largest counts, constants included.
- What float16 has at scale 1 by law (`catalogue.UNSCALED`: exponentials, ...) may be 0 below
  `2**-24` and inf above 65504, and what follows is what follows from that.
- An element of a loop's result that noise changes by more than itself is not compared.
- Where plain JAX or noise is not finite, inf is right, and so is the true number; nan is right
  where one of them is nan. A wrong finite number never is.

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
from jax_scalify.array import is_scaled
from tests.fuzz import catalogue
from tests.fuzz.programs import Discarded, Program, Statement, check_plain, load

_TOLERANCE = 4.0
_FACTOR = 4.0
_RUNS = 5
_EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "": 0.0}


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
        try:
            run_plain(program)
        except Exception:  # XLA refuses what JAX has traced
            raise Discarded from None
        message = re.sub(r"\s+", " ", str(error))[:500]
        return Failure("raises", f"{type(error).__name__}: {message}")
    leaves = jax.tree.leaves(results, is_leaf=is_scaled)
    leaves = [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0]
    for k, (leaf, aval) in enumerate(zip(leaves, avals, strict=True)):
        if leaf.shape != aval.shape or leaf.dtype != aval.dtype:
            return Failure(
                "dtype", f"{leaf.dtype}{leaf.shape}, plain JAX {aval.dtype}{aval.shape}", k
            )
    try:
        return _compare(program, got, avals)
    except Exception as error:  # of the plain program: XLA refuses it in float64, for one
        raise Discarded(str(error)) from error


def run_scalified(program: Program) -> Any:
    """The results of the scalified program, and their values in float32."""

    def run(*arguments: Any) -> Any:
        results = jsa.scalify(load(program.definitions()))(*arguments)
        return results, jsa.asarray(results, jnp.float32)

    return (jax.jit(run) if program.jitted else run)(*(i.argument() for i in program.inputs))


def _leaves(result: Any) -> list[np.ndarray]:
    arrays = [np.asarray(r) for r in jax.tree.leaves(result) if r.dtype != jax.dtypes.float0]
    return [a if a.dtype.kind in "iub" else a.astype(np.float64) for a in arrays]


def run_plain(program: Program, dtype: str = "") -> list[np.ndarray]:
    """The results of the plain program in its own dtypes, or with floats of one dtype."""
    source = program.definitions()
    if dtype:
        source = re.sub(r"jnp\.(float32|float16|bfloat16)\b", f"jnp.{dtype}", source)
    with jax.enable_x64(dtype == "float64"):
        values = [
            jnp.asarray(i.value(), (dtype or i.dtype) if i.is_float else None)
            for i in program.inputs
        ]
        return _leaves(jax.jit(load(source))(*values))


def run_noisy(program: Program, run: int) -> list[np.ndarray]:
    """The results in float64, with noise on every input and result."""
    source = re.sub(
        r"jnp\.(float32|float16|bfloat16)\b", "jnp.float64", program.definitions("noise")
    )
    # Names whose elements are only moved on.
    moved = {i.name for i in program.inputs} | {s.target for s in program.statements if s.moves}
    moved -= set().union(*(s.uses() for s in program.statements if not s.moves))
    dtypes = [
        ("stored " if i.name in moved else " ") + i.dtype if i.is_float else ""
        for i in program.inputs
    ]
    dtypes += ["" if s.target in moved else _kind(s, run) for s in program.statements]
    reverse = program.wrapper in ("grad", "remat")
    with jax.enable_x64(True):
        constants: list[float | None] = [None] * len(program.inputs)
        constants += [_largest_constant(s) for s in program.statements]
        known = dict(dtypes=dtypes, constants=constants, run=run, reverse=reverse)
        noise = functools.partial(_noise, **known)
        values = [jnp.asarray(i.value()) for i in program.inputs]
        return _leaves(jax.jit(load(source, noise=noise))(*values))


def _largest_constant(statement: Statement) -> float | None:
    """The largest constant of a statement that puts operands together; None for another."""
    if not catalogue.JOINS.search(statement.source):
        return None
    numbers = re.findall(r"(?<![\w.])\d+\.?\d*(?:e[+-]?\d+)?(?![\w])", statement.source)
    return max([abs(float(n)) for n in numbers], default=0.0)


def _kind(statement: Statement, run: int) -> str:
    """The dtype whose noise a result gets; in the first run also whether it is cut off."""
    unscaled = run == 0 and catalogue.UNSCALED.search(statement.source)
    return (
        f"cut {statement.dtype}" if unscaled and statement.dtype == "float16" else statement.dtype
    )


def _noise(
    tree: Any,
    index: int,
    *operands: Any,
    dtypes: list[str],
    constants: list[float | None],
    run: int,
    reverse: bool,
) -> Any:
    """Change the floating arrays of a tree, and independently their tangents or cotangents."""
    kind, _, dtype = dtypes[index].rpartition(" ")
    if not dtype:
        return tree
    least = 0.0
    if dtype == "float16" and constants[index] is not None:
        floats = [jnp.asarray(x) for x in jax.tree.leaves(operands)]
        floats = [x for x in floats if jnp.issubdtype(x.dtype, jnp.floating) and x.size]
        least = 2.0**-14 * functools.reduce(jnp.maximum, map(_largest_of, floats), constants[index])

    def change(x: Any) -> Any:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
            return x
        if kind == "cut":
            return jnp.where(jnp.abs(x) > 65504, x * jnp.inf, jnp.where(jnp.abs(x) < 2**-24, 0, x))
        x = _lost(x, least, (run, index)) if constants[index] is not None else x
        absolute = dtype == "float16" and kind != "stored"
        perturb = functools.partial(_perturb, eps=_EPS[dtype], absolute=absolute)
        return (_in_reverse if reverse else _forward)(perturb, (run, index))(x)

    return jax.tree.map(change, tree)


def _largest_of(x: Any) -> Any:
    return jax.lax.stop_gradient(jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0)))


def _lost(x: Any, least: Any, seed: tuple[int, ...]) -> Any:
    """Lose what is less than the least number that float16 holds beside the largest."""
    if seed[0] % 2:
        return jnp.where(jnp.abs(x) < least, 0, x)
    return x + jnp.where(x == 0, 0, least * np.random.default_rng(seed).uniform(-1, 1, x.shape))


def _perturb(x: Any, seed: tuple[int, ...], *, eps: float, absolute: bool) -> Any:
    rng = np.random.default_rng(seed)
    relative, lost = (
        rng.choice([-1.0, 1.0], x.shape) * rng.uniform(0.5, 1, x.shape) for _ in range(2)
    )
    changed = x * (1 + eps * relative)
    if not absolute:
        return changed
    limit = 2.0**-14 * jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0))
    changed = changed + limit * lost
    if seed[0] % 2:
        changed = jnp.where(jnp.abs(x) < limit, 0, changed)
    return jnp.where(x == 0, x, changed)


def _forward(perturb: Any, seed: tuple[int, ...]) -> Any:
    @jax.custom_jvp
    def noisy(x):
        return perturb(x, seed)

    # Linear in the tangent, so without an absolute part.
    noisy.defjvp(lambda p, t: (noisy(*p), perturb(*t, (*seed, 1), absolute=False)))
    return noisy


def _in_reverse(perturb: Any, seed: tuple[int, ...]) -> Any:
    @jax.custom_vjp
    def noisy(x):
        return perturb(x, seed)

    noisy.defvjp(lambda x: (noisy(x), None), lambda _, ct: (perturb(ct, (*seed, 1)),))
    return noisy


def _compare(program: Program, got: list[np.ndarray], avals: tuple[Any, ...]) -> Failure | None:
    want = run_plain(program, "float64")
    limits = _limits(program, want, avals)
    wrong = [_off(g, w, limit) for g, w, limit in zip(got, want, limits, strict=True)]
    if not any(np.any(w) for w in wrong):
        return None
    plain = [run_plain(program, "float32")]
    if all(np.array_equal(i.value(), i.value().astype(i.dtype)) for i in program.inputs):
        plain.append(run_plain(program))
    noisy = [run_noisy(program, run) for run in range(_RUNS)]
    for k, (g, w, limit) in enumerate(zip(got, want, limits)):
        if not np.any(wrong[k]):
            continue
        still = wrong[k]
        for p in plain:
            still = still & _off(g, p[k], limit)
        others = [p[k] for p in plain + noisy]
        still = still & ~_excused(g, w, others, limit)
        if program.wrapper in ("scan", "while"):
            still = still & ~_unknown(w, others)
        if np.any(still):
            return Failure("value", _told(g, w, plain[0][k], still), k)
    return None


def _limits(program: Program, want: list[np.ndarray], avals: tuple[Any, ...]) -> list[Any]:
    """The absolute error allowed to each leaf."""
    dtypes = [i.dtype for i in program.inputs if i.is_float]
    dtypes += [s.dtype for s in program.statements if s.dtype]
    eps = _TOLERANCE * max(_EPS[d] for d in dtypes)
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
        excused |= np.isinf(got) & np.any(~np.isfinite(np.stack(others)), axis=0)
        excused |= np.isnan(got) & np.any(np.isnan(np.stack(others)), axis=0)
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
        return np.any(np.stack([np.abs(o - want) > np.abs(want) for o in others]), axis=0)


def _told(got: np.ndarray, want: np.ndarray, plain: np.ndarray, wrong: np.ndarray) -> str:
    with np.printoptions(precision=6, threshold=24):
        return (
            f"got {got[wrong]} where float64 gives {want[wrong]} and plain float32 {plain[wrong]}; "
            f"{int(wrong.sum())} of {wrong.size} elements"
        )
