"""JAX's own test harnesses, run through `scalify` and judged against the plain function.

A case is one harness (one use of one primitive, in one dtype). It is evaluated under every kind of
input scale, and is right only if it is right under each. Values are compared, `data * scale`, with
the plain function evaluated in float64 on the dequantised inputs.
"""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.internal_test_util import test_harnesses

import jax_scalify as jsa
from benchmarks.coverage.judging import in_precision, is_float, judge_all, precision, to_float64
from jax_scalify.interpreter import registry

DTYPES = ("float32", "float16", "bfloat16")
SEED = 0

# Functions whose meaning depends on the dtype: the reference is computed in the harness's own.
OWN_DTYPE = re.compile("bitcast_convert_type|nextafter|reduce_precision|random_.*|iota")

# Why a remaining case is not right, by a regular expression on its name.
REASONS = {
    r"^integer_pow_.*float16.*y_-3": "where an element lies far below the scale of its array, the "
    "data's own `x**-3` overflows float16, before the result's scale brings it back",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one harness: "right", "wrong", "raised" or "skipped" (not in JAX here)."""

    group: str
    dtype: str
    status: str
    reason: str = ""
    scales: tuple[str, ...] = ()
    reference: str = ""
    dequantised: tuple[tuple[str, str], ...] = ()
    units: float = 0.0


def load() -> dict[str, Any]:
    """Return the floating-point harnesses by a name that is the same in every process."""
    found: dict[str, Any] = {}
    for harness in test_harnesses.all_harnesses:
        if np.dtype(harness.dtype).name in DTYPES:
            name, number = harness.fullname, 2
            while name in found:
                name, number = f"{harness.fullname}#{number}", number + 1
            found[name] = harness
    return dict(sorted(found.items(), key=lambda item: (item[1].group_name, item[0])))


def _pattern(size: int) -> np.ndarray:
    return 2.0 ** (np.arange(size) % 3 - 1)


def _scale_like(x: np.ndarray, kind: str) -> np.ndarray:
    if kind in ("trailing", "leading") and x.ndim >= 2:
        axis = -1 if kind == "trailing" else 0
        shape = [1] * x.ndim
        shape[axis] = x.shape[axis]
        return _pattern(x.shape[axis]).reshape(shape).astype(np.float32)
    return np.float32({"2**-6": 2**-6, "2**6": 2**6}.get(kind, 1))


def _scale_kinds(args: list[Any]) -> list[str]:
    kinds = ["2**-6", "1", "2**6"]
    if any(is_float(x) and np.ndim(x) >= 2 for x in args):
        kinds += ["trailing", "leading"]
    return kinds


def _dequantised(args: list[Any], kind: str) -> list[Any]:
    """The floating arguments as float64 (or complex128) values."""
    return [to_float64(x) * _scale_like(x, kind) if is_float(x) else x for x in args]


def _widened(static: Any, dtype: Any) -> Any:
    """A static argument (an initial value, a preferred dtype) for evaluation in a wider dtype."""
    if isinstance(static, (np.ndarray, np.generic)):
        return static.astype(dtype) if jnp.issubdtype(static.dtype, jnp.floating) else static
    if isinstance(static, (type, np.dtype)) and jnp.issubdtype(static, jnp.floating):
        return dtype
    return static


class Functions:
    """A harness's function in its own dtype, in wider ones, and scalified, each compiled once."""

    def __init__(self, harness: Any):
        self._harness = harness
        self.plain = jax.jit(harness.dyn_fun)
        self.scaled = jax.jit(jsa.scalify(harness.dyn_fun))
        self._wide: dict[str, Callable] = {}

    def in_dtype(self, dtype: Any) -> Callable:
        """The function with its static arguments in another dtype."""
        if dtype not in self._wide:
            harness, is_static = self._harness, test_harnesses.StaticArg

            def fun(*dyn: Any) -> Any:
                rest = iter(dyn)
                args = [
                    _widened(a.value, dtype) if isinstance(a, is_static) else next(rest)
                    for a in harness.arg_descriptors
                ]
                return harness.fun(*args)

            self._wide[dtype] = jax.jit(fun)
        return self._wide[dtype]

    def reference(self, values: list[Any], args: list[Any]) -> tuple[list[Any], str]:
        """Evaluate on dequantised values, as widely as the function allows.

        Returns:
            The outputs and the dtype that they were computed in.
        """
        for dtype in (np.float64, np.float32):
            if OWN_DTYPE.fullmatch(self._harness.group_name):
                break
            with jax.enable_x64(dtype == np.float64):
                wide = [in_precision(v, dtype) for v in values]
                try:
                    out = [np.asarray(x) for x in jax.tree.leaves(self.in_dtype(dtype)(*wide))]
                except Exception:  # noqa: BLE001, S112
                    continue
            is_wide = all(not is_float(o) or precision(o.dtype) == dtype for o in out)
            if is_wide or self._harness.group_name == "convert_element_type":
                return out, np.dtype(dtype).name
        own = [v.astype(x.dtype) if is_float(x) else x for v, x in zip(values, args, strict=True)]
        return _leaves(self.plain(*own)), "own dtype"


def _leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def _read_scaled(out: Any, plain: list[np.ndarray]) -> list[np.ndarray]:
    """Return the values of a scalified function's outputs; ValueError for a malformed one."""
    leaves = jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, jsa.ScaledArray))
    if len(leaves) != len(plain):
        raise ValueError(f"{len(leaves)} outputs instead of {len(plain)}")
    values = []
    for leaf, like in zip(leaves, plain, strict=True):
        is_scaled = isinstance(leaf, jsa.ScaledArray)
        data = np.asarray(leaf.data if is_scaled else leaf)
        if (data.shape, data.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"{data.dtype}{list(data.shape)} instead of {like.dtype}{list(like.shape)}"
            )
        if is_scaled:
            scale = np.asarray(leaf.scale, np.float64)
            if not np.all(np.isin(np.frexp(scale)[0], (0, 0.5))):
                raise ValueError(f"a scale is not a power of two: {scale.ravel()[:4]}")
            scale = scale.reshape(
                scale.shape + (1,) * (data.ndim - scale.ndim if scale.ndim else 0)
            )
            data = to_float64(data) * scale
        values.append(to_float64(data))
    return values


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:200]}"


_WARNING = re.compile(r"(?P<reason>.*?)(?: for| \() ?primitive `(?P<primitive>[^`]+)`", re.DOTALL)


def _reports(caught: Iterable[warnings.WarningMessage]) -> set[tuple[str, str]]:
    """The (primitive, reason) pairs among warnings."""
    pairs = set()
    for warning in caught:
        if issubclass(warning.category, jsa.DequantisedWarning):
            match = _WARNING.match(str(warning.message))
            if match:
                pairs.add((match["primitive"], match["reason"].strip()))
    return pairs


def run(harness: Any) -> Outcome:
    """Evaluate a harness under every kind of scale.

    It is skipped where the plain function cannot be evaluated on a CPU.
    """
    group, dtype = harness.group_name, np.dtype(harness.dtype).name
    if any(lim.filter(device="cpu", dtype=harness.dtype) for lim in harness.jax_unimplemented):
        return Outcome(group, dtype, "skipped", "listed as not implemented")
    args = [
        x if jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended) else np.asarray(x)
        for x in harness.dyn_args_maker(np.random.RandomState(SEED))
    ]
    functions = Functions(harness)
    try:
        like = _leaves(functions.plain(*args))
    except Exception as error:  # noqa: BLE001
        return Outcome(group, dtype, "skipped", _short(error))

    dequantised: set[tuple[str, str]] = set()
    reference, worst = "", 0.0
    failures: dict[str, tuple[str, str]] = {}
    for kind in _scale_kinds(args):
        values = _dequantised(args, kind)
        want, reference = functions.reference(values, args)
        plain = _plain_values(functions, values, args)
        registry._warned.clear()
        scaled = [
            jsa.ScaledArray(jnp.asarray(x), jnp.asarray(_scale_like(x, kind))) if is_float(x) else x
            for x in args
        ]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                out = jax.block_until_ready(functions.scaled(*scaled))
            except Exception as error:  # noqa: BLE001
                failures[kind] = ("raised", _short(error))
                continue
        dequantised |= _reports(caught)
        try:
            got = _read_scaled(out, like)
        except ValueError as error:
            failures[kind] = ("wrong", str(error))
            continue
        units, complaint = judge_all(
            harness, values, got, [to_float64(w) for w in want], plain, [x.dtype for x in like]
        )
        worst = max(worst, units)
        if complaint:
            failures[kind] = ("wrong", complaint)

    status = next((s for s in ("raised", "wrong") if any(f[0] == s for f in failures.values())), "")
    kinds = tuple(k for k, f in failures.items() if f[0] == status)
    reason = failures[kinds[0]][1] if kinds else ""
    return Outcome(
        group, dtype, status or "right", reason, kinds, reference, tuple(sorted(dequantised)), worst
    )


def _plain_values(functions: Functions, values: list[Any], args: list[Any]) -> list | None:
    """The plain function's outputs on the dequantised values, or None if it cannot hold them."""
    own = []
    for value, arg in zip(values, args, strict=True):
        if is_float(arg):
            narrow = value.astype(arg.dtype)
            if not np.array_equal(to_float64(narrow), value, equal_nan=True):
                return None
            value = narrow
        own.append(value)
    return [to_float64(x) for x in _leaves(functions.plain(*own))]
