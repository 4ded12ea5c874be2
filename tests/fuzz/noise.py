"""What rounding can do to a program: it is evaluated in float64 with noise on each equation.

A computed array is off by up to the epsilon of a dtype, element by element. One of float16 has an
absolute error also, `2**-14` of its largest magnitude: all its elements may get one scale. What is
less is 0 in every second run. Where arrays are added (`_SUMS`) or put together (`_JOINS`), the
largest operand counts. What is only put together has an error in the narrow dtypes, which XLA may
round there or not (that of bfloat16 in the first five runs), and so do both operands of a scattered
sum; where elements are only moved (`_MOVES`) they stay as they are. What float16 has at scale 1 by
law (`_UNSCALED`: exponentials, bits, ...) is 0 below `2**-24` and inf above `2**13` in the first
two runs, operands and results (65504 it holds, but not multiplied by a mask of scale `2**-3`); so
is what no scale reaches, and a quotient or negative power that is `2**13` times that of the largest
magnitudes. The other dtypes have the range of float32, of which `2**-100` is left below the
largest.

What one condition, number or index chooses, it chooses with its scale: the operands beside it do
not count (`_is_choice`), nor do the other items of a stack or of a loop's results (`_stacks`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from jax_scalify import _compat

RUNS = 11
ROUNDED = 9  # the run without noise
_SMALL = 2.0**-14
_TINY = 2.0**-100
_LEAST = 2.0**-120
_FLUSHED = 2.0**-158  # the smallest number of float32, at the scale of a square: 2**-32 or more
_NARROW = 2.0**-20  # an epsilon that is less is of float32
_LARGEST = 3.4e38  # what is beyond is a mask
_TOP = 2.0**13  # float16 at scale 1 has 65504
_BEYOND = 2.0**139  # and at 2**126, the largest scale, so many times that

_MOVES = frozenset(
    "abs broadcast_in_dim convert_element_type copy copy_p cummax cummin dynamic_slice expand_dims "
    "gather imag iota neg optimization_barrier real reduce_max reduce_min reduce_precision reshape "
    "rev sign slice sort split squeeze stop_gradient tile transpose unstack argmax argmin".split()
)
_JOINS = frozenset(
    "clamp complex concatenate dynamic_update_slice max min pad scatter scatter_max "
    "scatter_min select_n stack".split()
)
_SUMS = frozenset("add add_any cumsum reduce_sum scatter_add scatter_sub sub".split())
_UNSCALED = frozenset(
    "Frexp Ldexp acos acosh asin asinh atan atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt "
    "ceil cos cosh cumlogsumexp cumprod digamma erf erf_inv erfc exp exp2 expm1 floor igamma "
    "igamma_grad_a igammac lgamma log log1p logistic lu nextafter polygamma pow random_gamma_grad "
    "reduce reduce_prod regularized_incomplete_beta rem round scatter_mul sin sinh tan tanh "
    "zeta".split()
)
_ROUNDINGS = frozenset("ceil floor round".split())  # of scale 1 at least, all 0 or not
_INLINED = frozenset(
    "jit pjit closed_call core_call checkpoint remat remat2 custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr".split()
)


def noisy_runs(
    function: Callable[..., Any], values: Sequence[Any], eps: float, is_short: bool, runs: int
) -> list[list[Any]]:
    """The leaves of `function(*values)` in each run; call it with x64 enabled.

    Args:
        function: a function of arrays.
        values: its arguments.
        eps: the epsilon of the dtype.
        is_short: whether the dtype is float16.
        runs: how many.
    """
    run = noisy_function(function, values, eps, is_short)
    return [run(np.float64(k), *values) for k in range(runs)]


def noisy_function(
    function: Callable[..., Any], values: Sequence[Any], eps: float, is_short: bool
) -> Callable[..., list[Any]]:
    """A function of the number of a run and of arguments like `values`, see `noisy_runs`."""
    closed = jax.make_jaxpr(function)(*values)
    kept = [k for k, a in enumerate(closed.out_avals) if a.dtype != jax.dtypes.float0]

    @jax.jit
    def run(number: Any, *arguments: Any) -> list[Any]:
        noise = _Noise(eps, is_short)
        results = noise.run(closed, [noise.perturbed(x, number) for x in arguments], number)
        return [results[k] for k in kept]

    return run


class _Noise:
    """Evaluates jaxprs.

    Beside each array it keeps the magnitude that its scale is made for: its own, or, where arrays
    were added or put together, that of the largest operand.
    """

    def __init__(self, eps: float, is_short: bool) -> None:
        self._eps = eps
        self._is_short = is_short
        self._count = 0  # each array has noise of its own

    def run(self, closed: Any, arguments: Sequence[Any], run: Any) -> list[Any]:
        """The results of a closed jaxpr."""
        return self._evaluate(closed, arguments, list(map(_size, arguments)), run)[0]

    def _evaluate(
        self, closed: Any, arguments: Sequence[Any], sizes: Sequence[Any], run: Any
    ) -> tuple[list[Any], list[Any]]:
        """The results of a jaxpr, and the magnitudes of their scales."""
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        known = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, arguments))
        large = dict(zip(jaxpr.constvars, map(_size, consts))) | dict(zip(jaxpr.invars, sizes))

        def read(atom: Any) -> tuple[Any, Any]:
            if isinstance(atom, jex_core.Literal):
                return atom.val, _size(atom.val)
            return known[atom], large[atom]

        stacks = _stacks(jaxpr)
        for eqn in jaxpr.eqns:
            read_all = [read(v) for v in eqn.invars]
            operands, sizes = [x for x, _ in read_all], [size for _, size in read_all]
            if eqn.primitive.name == "stack" and eqn.outvars[0] in stacks:
                results, sizes = [eqn.primitive.bind(*operands, **eqn.params)], sizes[:1]
            elif eqn.primitive.name in _INLINED:
                params = eqn.params.values()
                inner = next(p for p in params if hasattr(p, "eqns") or hasattr(p, "jaxpr"))
                results, sizes = self._evaluate(inner, operands, sizes, run)
            else:
                results, sizes = self._equation(eqn, operands, sizes, run)
            sizes = [0.0 if v in stacks else size for v, size in zip(eqn.outvars, sizes)]
            known.update(zip(eqn.outvars, results))
            large.update(zip(eqn.outvars, sizes))
        read_all = [read(v) for v in jaxpr.outvars]
        return [x for x, _ in read_all], [size for _, size in read_all]

    def _equation(
        self, eqn: Any, operands: list[Any], sizes: list[Any], run: Any
    ) -> tuple[Sequence[Any], list[Any]]:
        name, params = eqn.primitive.name.replace("-", "_"), eqn.params
        if name == "call_hi_primitive":
            name = type(params["_prim"]).__name__
        loops = {"cond": self._cond, "while": self._while, "scan": self._scan}
        if name in loops:
            results = loops[name](params, operands, run)
            return results, list(map(_size, results))
        if name in _UNSCALED:
            operands = [self._cut(x, run, run <= ROUNDED) for x in operands]
        if name in ("scatter_add", "scatter_sub") and self._eps > _NARROW:  # rounded there, or not
            operands = [self._rounded(x, size, run) for x, size in zip(operands, sizes)]
        if name == "mul":  # XLA would make 0 of 0 * inf, where the 0 is a cast mask
            operands = lax.optimization_barrier(operands)
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
        results = list(results) if eqn.primitive.multiple_results else [results]
        if name in ("div", "integer_pow"):
            results = [self._in_range(results[0], name, params, sizes, run)]
        own = list(map(_size, results))
        if _is_choice(name, operands, results):
            own = [_chosen(name, operands, sizes, own[0])]
        elif name in _MOVES | _JOINS | _SUMS:
            largest = functools.reduce(jnp.maximum, sizes, np.float64(0))
            own = [jnp.maximum(size, largest) for size in own]
        elif name in _ROUNDINGS:
            own = [jnp.maximum(size, 1.0) for size in own]
        elif name in ("mul", "dot_general"):
            own = [jnp.maximum(size, sizes[0] * sizes[1]) for size in own]
        elif name == "div":  # nan has no size
            divisor = jnp.where(sizes[1] > 0, sizes[1], 1.0)
            own = [jnp.maximum(size, sizes[0] / divisor) for size in own]
        is_exact = name in _MOVES or name in _JOINS and self._eps < _NARROW
        if not is_exact:
            rounded = [self._rounded(x, size, run) for x, size in zip(results, own)]
            # The derivative of a maximum asks which operand it is equal to.
            exact = (run >= (7 if self._is_short else 5)) & (name in _JOINS)
            results = [jnp.where(exact, x, r) for x, r in zip(results, rounded)]
        if name in _UNSCALED:
            results = [self._cut(x, run) for x in results]
        # Some functions are float32 whatever they are given, as the scores of attention.
        dtypes = [v.aval.dtype for v in eqn.outvars]
        return [x.astype(d) if _is_inexact(x) else x for x, d in zip(results, dtypes)], own

    def _closed(self, closed: Any, run: Any) -> Callable[..., list[Any]]:
        return lambda *arguments: self.run(closed, arguments, run)

    def _cond(self, params: Any, operands: list[Any], run: Any) -> Sequence[Any]:
        branches = [self._closed(b, run) for b in params["branches"]]
        return lax.switch(operands[0], branches, *operands[1:])

    def _while(self, params: Any, operands: list[Any], run: Any) -> Sequence[Any]:
        count, more = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body = operands[:count], operands[count : count + more]
        goes_on, body = (self._closed(params[k], run) for k in ("cond_jaxpr", "body_jaxpr"))

        def step(carry: list[Any]) -> list[Any]:
            goes = goes_on(*of_cond, *carry)[0]  # of a batch, each example has its own
            return [
                jnp.where(goes.reshape(goes.shape + (1,) * (x.ndim - goes.ndim)), new, x)
                for x, new in zip(carry, body(*of_body, *carry), strict=True)
            ]

        return lax.while_loop(
            lambda carry: jnp.any(goes_on(*of_cond, *carry)[0]), step, operands[count + more :]
        )

    def _scan(self, params: Any, operands: list[Any], run: Any) -> Sequence[Any]:
        first, last = itertools.accumulate(_compat.scan_counts(params))
        body = self._closed(params["jaxpr"], run)

        def step(carry: Any, elements: Any) -> Any:
            results = body(*operands[:first], *carry, *elements)
            return results[: last - first], results[last - first :]

        carry, stacked = lax.scan(
            step,
            operands[first:last],
            operands[last:],
            length=params["length"],
            reverse=params["reverse"],
        )
        return [*carry, *stacked]

    def _random(self, x: Any, run: Any) -> Any:
        """Numbers in [-1, 1): others for each array and run."""
        self._count += 1
        places = np.arange(1, x.size + 1).reshape(x.shape)
        wave = jnp.sin(places * 12.9898 + self._count * 78.233 + run * 37.719) * 43758.5453
        return 2 * (wave - jnp.floor(wave)) - 1

    def _rounded(self, x: Any, largest: Any, run: Any) -> Any:
        """An array that was computed in the dtype."""
        if not _is_inexact(x):
            return x
        relative = self._random(x, run)
        relative = jnp.sign(relative) * (1 + jnp.abs(relative)) / 2
        changed = self._at_one_scale(x * (1 + self._eps * relative), x, largest, run)
        return jnp.where(run == ROUNDED, _to_digits(x, self._eps), changed)

    def perturbed(self, x: Any, run: Any) -> Any:
        """An argument: what is computed of it may be so in another dtype."""
        return self._rounded(x, _size(x), run)

    def _at_one_scale(self, changed: Any, x: Any, largest: Any, run: Any) -> Any:
        """What is left of `changed` at the scale of the largest magnitude."""
        if not _is_inexact(x):
            return changed
        if not self._is_short:
            lost = (run % 2 == 1) & (jnp.abs(x) < jnp.maximum(_TINY * largest, _FLUSHED))
            changed = jnp.where((run < 2) & (jnp.abs(x) > _LARGEST), x * jnp.inf, changed)
            # A constant that is not 0 stays so: it is cut off at the smallest number at the scale.
            least = jnp.where(run == 3, jnp.sign(x) * _LEAST * largest, 0)
            return jnp.where(lost, least, changed)
        changed = jnp.where((run < 2) & (jnp.abs(x) > _BEYOND), x * jnp.inf, changed)
        least = _SMALL * largest
        blurred = changed + jnp.where(x == 0, 0, least * self._random(x, run))
        flushed = jnp.where(jnp.abs(x) < least, 0, changed)
        return jnp.where(run % 2, flushed, blurred)

    def _in_range(self, x: Any, name: str, params: Any, sizes: list[Any], run: Any) -> Any:
        """A quotient or power, at the scale that the magnitudes of its operands make."""
        if not self._is_short or not _is_inexact(x):
            return x
        scale = sizes[0] / sizes[1] if name == "div" else sizes[0] ** np.float64(params["y"])
        return jnp.where(_cuts(run) & (jnp.abs(x) > _TOP * scale), x * jnp.inf, x)

    def _cut(self, x: Any, run: Any, cuts: Any = True) -> Any:
        """What is left of an array at scale 1."""
        if not self._is_short or not _is_inexact(x):
            return x
        x = jnp.asarray(x)
        size = jnp.abs(x)
        cut = jnp.where(size > _TOP, x * jnp.inf, jnp.where(size < 2.0**-24, 0, x))
        return jnp.where(_cuts(run) & cuts, cut, x)


def _cuts(run: Any) -> Any:
    return (run < 2) | (run >= ROUNDED)


def _to_digits(x: Any, eps: float) -> Any:
    """Numbers of float64 rounded to the digits of a dtype, whatever their exponents are."""
    if jnp.iscomplexobj(x):
        return lax.complex(_to_digits(jnp.real(x), eps), _to_digits(jnp.imag(x), eps))
    x = jnp.asarray(x)
    return lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, min(-round(math.log2(eps)), 23))


def _is_choice(name: str, operands: Sequence[Any], results: Sequence[Any]) -> bool:
    """Whether one of the operands is chosen as a whole."""
    if name == "select_n":
        return np.ndim(operands[0]) == 0
    return name in ("max", "min", "clamp") and np.ndim(results[0]) == 0


def _chosen(name: str, operands: Sequence[Any], sizes: Sequence[Any], own: Any) -> Any:
    """The magnitude that the scale of what is chosen is made for."""
    if name == "select_n":
        return jnp.stack([jnp.asarray(s, np.float64) for s in sizes[1:]])[operands[0].astype(int)]
    return own


def _stacks(jaxpr: Any) -> set[Any]:
    """The stacks, and the results of loops, of which nothing is read but an item."""
    found, others = set(), set(v for v in jaxpr.outvars if not isinstance(v, jex_core.Literal))
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan" or name == "stack" and params["axis"] == 0:
            found.update(v for v in eqn.outvars if v.aval.ndim)
        is_item = name == "dynamic_slice" and params["slice_sizes"][0] == 1
        read = eqn.invars[1:] if is_item else eqn.invars
        others.update(v for v in read if not isinstance(v, jex_core.Literal))
    return found - others


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact) and math.prod(np.shape(x)) > 0


def _size(x: Any) -> Any:
    """The largest ordinary magnitude. What was computed beyond float32 has the largest scale."""
    if not _is_inexact(x):
        return np.float64(0)
    size = jnp.abs(jnp.asarray(x))
    is_computed = (size > 1.01 * _LARGEST) & jnp.isfinite(size)
    beyond = jnp.where(is_computed, 2.0**126, 0)
    return jnp.max(jnp.where(size < _LARGEST, size, beyond))
