"""A row for every value of a computation: its scale, its range, and what it loses."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.arrays.scaled_array import check_scaled
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import sub_jaxprs
from jax_scalify.conversions.nnx_objects import pure_call
from jax_scalify.numerics import html, text
from jax_scalify.numerics.host_statistics import DTYPES, as_formats, measure
from jax_scalify.numerics.interpreting import Runner, Step, Tagged, scaled_arguments, trace
from jax_scalify.numerics.naming import Phases, has_same_elements, matches, scopes_of, updated
from jax_scalify.numerics.rows import PHASES, Row, exponent_range

_SHOWN = 40


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What `report` has seen; printed, a table: rows with nan or inf, then the worst ones.

    Attributes:
        rows: in the order in which values were computed, arguments first.
        formats: dtypes that were asked about, by name.
        function: the name of the function that was run.
    """

    rows: tuple[Row, ...]
    formats: tuple[str, ...] = ()
    function: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def filter(
        self,
        name: str | None = None,
        *,
        phase: str | None = None,
        primitive: str | None = None,
        dtype: Any = None,
        where: Callable[[Row], bool] | None = None,
    ) -> Report:
        """Return the rows for which everything that is given holds.

        Args:
            name: part of the name, or a pattern of all of it with * and ?: `"block_*/mlp"`.
            phase: "input", "forward", "backward" or "update".
            primitive: its name.
            dtype: of the value.
            where: a predicate on rows.

        Raises:
            ValueError: if `phase` is unknown.
        """
        if phase is not None and phase not in PHASES:
            raise ValueError(f"`phase` must be one of {', '.join(PHASES)}, got {phase!r}.")
        kind = None if dtype is None else jnp.dtype(dtype).name

        def keep(row: Row) -> bool:
            return (
                (name is None or matches(row.name, name))
                and (phase is None or row.phase == phase)
                and (primitive is None or row.primitive == primitive)
                and (kind is None or row.dtype == kind)
                and (where is None or where(row))
            )

        return self._of(filter(keep, self.rows))

    def sort(self, key: str | Callable[[Row], Any] = "badness", *, reverse: bool = False) -> Report:
        """Return the rows sorted by an attribute, or by a function; by default the worst first.

        The worst are those with nan or infinity, in the order in which these were computed.
        """
        if key == "badness":
            return self.sort(self._order, reverse=reverse)
        of = key if callable(key) else lambda row: getattr(row, key)
        return self._of(sorted(self.rows, key=of, reverse=reverse))

    def _of(self, rows: Iterable[Row]) -> Report:
        return dataclasses.replace(self, rows=tuple(rows))

    def _order(self, row: Row) -> tuple[int, float, float]:
        """Rows that are not finite, as they were computed; then arrays before numbers."""
        if row.nonfinite:
            return 0, math.inf if row.nonfinite_at is None else row.nonfinite_at, 0
        return 1, row.size == 1, -row.badness(self.formats)

    def group(self, depth: int | None = None) -> dict[str, Report]:
        """Return a report for each module: for names that agree, in their first `depth` scopes."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault("/".join(row.name.split("/")[:depth]), []).append(row)
        return {name: self._of(rows) for name, rows in groups.items()}

    def underflowing(self, dtype: Any, share: float = 0.01) -> Report:
        """Return the rows of which a dtype would make more than a share zero, the worst first.

        Raises:
            ValueError: if nothing is known of this dtype: name it in `formats` of `report`.
        """
        rows = [row for row in self.rows if row.shares(dtype)[0] > share]
        rows.sort(key=lambda row: -row.shares(dtype)[0])
        return Report(tuple(rows), (jnp.dtype(dtype).name,), self.function)

    @property
    def summary(self) -> str:
        """One sentence that says how many values there are, and how many lose something."""
        texts = []
        for dtype in (None, *self.formats):
            lossy = sum(any(s > 0.01 for s in row.shares(dtype)) for row in self.rows)
            texts.append(f"{lossy} in {'their own dtype' if dtype is None else dtype}")
        nonfinite = sum(row.nonfinite > 0 for row in self.rows)
        scaled = sum(row.scale is not None for row in self.rows)
        return (
            f"{len(self.rows)} values, {scaled} scaled, {nonfinite} with nan or inf. Values with "
            f"more than 1% of the elements lost, subnormal or at the limit: {', '.join(texts)}."
        )

    def __str__(self) -> str:
        shown = self.sort().rows[:_SHOWN]
        table = [text.header(self.formats), *(text.cells(row, self.formats) for row in shown)]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(cells, widths)).rstrip() for cells in table]
        if len(self.rows) > len(shown):
            lines.append(f"... and {len(self.rows) - len(shown)} more")
        if any(row.nonfinite for row in shown):
            lines.append(text.NONFINITE)
        lines.append(text.LOST)
        return "\n".join([*lines, self.summary])

    __repr__ = __str__

    def to_json(self, file: str | Path | None = None) -> str:
        """Return all rows as JSON, and write it to a file if one is given."""
        rows = [row.as_dict() for row in self.rows]
        found = json.dumps(
            {"summary": self.summary, "formats": list(self.formats), "rows": rows}, indent=1
        )
        if file is not None:
            Path(file).write_text(found)
        return found

    def to_html(self, file: str | Path | None = None) -> str:
        """Return a page with all rows, to be sorted and searched, and write it if a file is given.

        Rows with nan or inf come first, in the order of computation, and are marked. The page needs
        nothing else: no network, no library. A row's exponents are drawn as bars. It is dark where
        the browser is, and can be read on a phone.
        """
        shown = self.sort().rows
        page = html.page(self.rows, shown, self.formats, self.summary, self.function)
        if file is not None:
            Path(file).write_text(page, encoding="utf-8")
        return page

    def _repr_html_(self) -> str:
        return html.table(self.sort().rows, self.formats, self.summary, _SHOWN)

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each value.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("`to_dataframe` needs pandas: `pip install pandas`.") from error
        records = []
        for row in self.rows:
            record = row.as_dict()
            record.pop("histogram")
            low, high = record.pop("scale") or (None, None)
            record |= {"scale_low": low, "scale_high": high, "shape": tuple(row.shape)}
            for name, found in record.pop("fits").items():
                record |= {f"{kind}_{name}": count for kind, count in found.items()}
            records.append(record)
        return pandas.DataFrame.from_records(records)


def report(
    fun: Callable, *, formats: Sequence[Any] = (), everything: bool = False
) -> Callable[..., Report]:
    """Make a function that runs `fun` once and reports on every value that it computes.

    The values are those of the equations of `fun`, one by one, without XLA's fusions: inside of
    `jit`, loops, remat, derivatives and an optimizer. Of a scalified function they are the data,
    with their scales. All is brought to the host and measured there, so it takes its time; nothing
    of it stays in `fun`. What kernels do (Pallas, `shard_map`) is one value.

    Args:
        fun: any function of arrays, `ScaledArray` and trees of them; jitted or not, scalified or
            not. Static arguments are to be bound beforehand, by `functools.partial`.
        formats: dtypes, or their names, to ask "what would this make of the data?". Known without
            asking are float32, bfloat16, float16, float8_e5m2 and float8_e4m3fn.
        everything: report what only moves data, too: reshapes, transposes, broadcasts.

    Returns:
        A function of the arguments of `fun` that returns a `Report`.

    Raises:
        TypeError: if `fun` is not callable, or `formats` has something else than real floating
            dtypes.
        ValueError: when called, if an argument has a scale that is not a power of two or 0.

    Example:
        >>> x = jnp.array([1.0, 2.0**-20, 2.0**-30])
        >>> seen = jsa.numerics.report(lambda x: x * 2, formats=["float16"])(x)
        >>> print(seen.rows[-1].primitive, seen.rows[-1].fit("float16"))
        mul Fit(underflow=1, subnormal=1, overflow=0)
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be callable, got {type(fun).__name__}.")
    asked = as_formats(formats)
    measured = tuple(dict.fromkeys((*DTYPES, *asked)))

    @jax.debug_nans(False)  # a report is of values that are nan, too
    def run(*args: Any, **kwargs: Any) -> Report:
        check_scaled(args, "args")
        check_scaled(kwargs, "kwargs")
        call = pure_call(fun, args, kwargs)
        closed, arrays, names = trace(call)
        collector = _Collector(measured, everything)
        collector.arguments(call.args, call.kwargs)
        operands = [Tagged(*pair) for pair in zip(arrays, names, strict=True)]
        Runner(collector).run(closed, operands)
        return Report(collector.rows(), tuple(d.name for d in asked), _name_of(fun))

    return run


def _name_of(fun: Callable) -> str:
    """The name of a function; of a bound or partial one, or an object, the best that there is."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


class _Collector:
    """Makes rows of the equations that a `Runner` runs.

    The tag of a value is the argument that it is an update of.
    """

    def __init__(self, formats: tuple[np.dtype, ...], everything: bool):
        self._formats = formats
        self._everything = everything
        self._rows: dict[Any, Row] = {}
        self._count = 0  # of measured values
        self._phases = Phases()

    def rows(self) -> tuple[Row, ...]:
        return tuple(self._rows.values())

    def arguments(self, args: tuple, kwargs: dict[str, Any]) -> None:
        for name, data, scale in scaled_arguments(args, kwargs):
            array = jnp.asarray(data)
            if dtypes.is_scalable(array.dtype):
                place = dict(name=name, phase="input", primitive="argument", line="")
                self._add(("argument", name), place, array, scale)

    def __call__(self, step: Step) -> list[str | None]:
        primitive = step.eqn.primitive.name
        phase = self._phases.of(step.path)
        leaves = [updated(step.operands, step.tags, result) for result in step.results]
        if not self._everything and has_same_elements(primitive):
            return leaves
        for i, (result, scale) in enumerate(zip(step.results, step.result_scales, strict=True)):
            if dtypes.is_scalable(result.dtype):
                name = scopes_of(step.path, primitive, phase, leaves[i])
                place = dict(name=name, phase=phase, primitive=primitive)
                place |= dict(line=step.line, function=step.function)
                self._add((step.path, id(step.eqn), i), place, result, scale, _lost(step, i))
        return leaves

    def _add(
        self, key: Any, place: dict[str, str], data: Any, scale: Any, underflow: int = 0
    ) -> None:
        self._count += 1
        found = measure(data, self._formats)
        row = Row(
            **place,
            shape=tuple(data.shape),
            dtype=jnp.dtype(data.dtype).name,
            scale=exponent_range(scale),
            runs=1,
            measure=found,
            underflow=underflow,
            nonfinite_at=self._count if found.nans or found.infs else None,
        )
        before = self._rows.get(key)
        if before is not None:
            scales = [s for s in (before.scale, row.scale) if s is not None]
            row = dataclasses.replace(
                row,
                scale=(min(s[0] for s in scales), max(s[1] for s in scales)) if scales else None,
                runs=before.runs + 1,
                measure=before.measure + row.measure,
                underflow=before.underflow + underflow,
                nonfinite_at=before.nonfinite_at or row.nonfinite_at,
            )
        self._rows[key] = row


def _lost(step: Step, index: int) -> int:
    """Count zeros of a narrow result that are none in float64."""
    result = step.results[index]
    if jnp.finfo(result.dtype).bits >= 32 or sub_jaxprs(step.eqn.params):
        return 0
    zeros = np.asarray(result) == 0
    if not zeros.any():
        return 0
    exact = _in_float64(step)
    if exact is None or np.shape(exact[index]) != zeros.shape:
        return 0
    return int(np.count_nonzero(zeros & (np.asarray(exact[index]) != 0)))


def _in_float64(step: Step) -> list[Any] | None:
    """The results of an equation in float64; None if it cannot be computed so."""
    operands = []
    for operand, scale in zip(step.operands, step.operand_scales, strict=True):
        if jnp.issubdtype(operand.dtype, jnp.floating):
            wide = np.asarray(operand).astype(np.float64)
            operand = wide if scale is None else wide * _aligned(scale, wide.ndim)
        operands.append(operand)
    params = {name: _widened(value) for name, value in step.eqn.params.items()}
    if "precision" in params:  # may be the algorithm of another dtype
        params["precision"] = None
    primitive = step.eqn.primitive
    if step.eqn.effects:
        return None
    try:
        with jax.enable_x64(True):
            bind = functools.partial(primitive.bind, **primitive.get_bind_params(params))
            # Callbacks and kernels that know only their own dtype are not run with another one.
            floating = [
                a.dtype
                for a in jax.tree.leaves(jax.eval_shape(bind, *operands))
                if jnp.issubdtype(a.dtype, jnp.floating)
            ]
            if any(dtype != np.float64 for dtype in floating):
                return None
            return [np.asarray(o) for o in jax.tree.leaves(bind(*operands))]
    except Exception:  # a primitive that knows no float64
        return None


def _aligned(scale: Any, ndim: int) -> np.ndarray:
    array = np.asarray(scale, np.float64)
    return array.reshape(array.shape + (1,) * (ndim - array.ndim)) if array.ndim else array


def _widened(param: Any) -> Any:
    """A parameter that names a floating dtype names float64; `None` names none, though to NumPy."""
    is_dtype = isinstance(param, (np.dtype, type))
    floating = is_dtype and jnp.issubdtype(param, jnp.floating)
    return np.dtype(np.float64) if floating else param
