"""Check which matmuls of a computation are really FP8."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jax_scalify import _compat
from jax_scalify.base.jaxprs import nested_equations
from jax_scalify.blocks.dot import has_kernel
from jax_scalify.numerics import hlo
from jax_scalify.numerics.compiling import CompiledProgram, compile_traced, find_target, trace
from jax_scalify.numerics.fp8_report import Fp8Report, Matmul
from jax_scalify.numerics.hlo import Sizes
from jax_scalify.numerics.scopes import clean_name, phase_of, scopes

# What cuBLASLt takes, as XLA rewrites a dot of FP8 operands into a call of it.
_FORMATS = ("f8e4m3fn", "f8e5m2")
_RESULTS = ("bf16", "f16", "f32")
_BLACKWELL = "a kernel of block formats is cuDNN's, on a Blackwell GPU"
# What becomes of a product that is compiled as no matmul.
_NO_MATMUL = frozenset({"multiply", "reduce"})


def check_fp8(
    fun: Callable,
    *args: Any,
    compile: bool = True,
    target: str | None = None,
    error: bool = False,
    **kwargs: Any,
) -> Fp8Report:
    """Tell of each matmul of a computation whether it is FP8, as traced and as compiled.

    XLA makes an FP8 kernel of a dot only if everything about it is right, and falls back to a wider
    one without a word. Nothing is executed. Convolutions and ragged dots are listed as well, what
    no result needs and what is inside of Pallas kernels is not.

    Args:
        fun: a function, jitted or scalified or both, or what its `trace` method returned.
        args: of `fun`: arrays, `ScaledArray` or `jax.ShapeDtypeStruct`, and trees of them.
        compile: whether to compile, and to look for each matmul in the compiled program.
        target: a device to compile for, which need not be there, as of `compile_report`; `None` for
            the devices of the arguments.
        error: whether to raise if a matmul of FP8 operands is not an FP8 kernel, or, if it is not
            compiled, could not be one.
        kwargs: of `fun`.

    Returns:
        A report with a row for each matmul; `print` shows a table, `to_json` is for programs. A
        dot is eligible if its operands are E4M3 x E4M3 or E4M3 x E5M2 in either order (the formats
        of NVIDIA), its result is bfloat16, float16 or float32, and each operand has a contracting
        dim and a free dim: XLA merges several. A ragged dot is one, of all groups at once. One of
        block formats is eligible if Blackwell has a kernel for both: the same kind of scales and
        width of elements, and not E5M2 x E5M2. Products of groups in block formats are rounded to
        them and multiplied in bfloat16, and listed as such.

    Raises:
        TypeError: if `fun` is not callable, or an argument of a function that is not jitted is
            neither an array nor a number nor a callable.
        ValueError: if `target` is unknown; with `error`, if a matmul of FP8 operands is not an FP8
            kernel. The message lists these matmuls.
        ModuleNotFoundError: if the compiler of the target is not installed.

    Example:
        >>> x = jnp.ones((32, 64), jnp.float8_e4m3fn)
        >>> dot = lambda x, y: jnp.dot(x, y.T, preferred_element_type=jnp.float16)
        >>> print(jsa.numerics.check_fp8(dot, x, x, compile=False).summary)
        1 of 1 matmuls have FP8 operands; 1 would be eligible on a GPU (not compiled).
    """
    device = find_target(target) if compile else None
    traced = trace(fun, args, kwargs, "check_fp8")
    rows = matmuls(traced)
    if compile and rows:
        report = fp8_report(rows, compile_traced(traced, device))
    else:
        report = Fp8Report(rows, None)
    if error:
        _check(report)
    return report


def matmuls(traced: jax.stages.Traced) -> tuple[Matmul, ...]:
    """The matmuls of a traced function that its results need, not compiled."""
    return tuple(_as_traced(*found) for found in _matmuls(_compat.live_jaxpr(traced.jaxpr)))


def fp8_report(rows: Sequence[Matmul], program: CompiledProgram) -> Fp8Report:
    """What became of traced matmuls in a compiled program."""
    rows, unmatched = match(rows, hlo.parse_program(program.text))
    return Fp8Report(rows, program.platform, unmatched)


def _check(report: Fp8Report) -> None:
    """Raise if a matmul of FP8 operands is no FP8 kernel."""
    asked = [row for row in report.rows if row.has_fp8_operands]
    compiled = report.backend is not None
    wrong = [row for row in asked if not (row.is_fp8 if compiled else row.eligible)]
    if wrong:
        found = "\n".join(
            f"  {row.name or row.op}, {row.phase}, at {row.line}: {row.kernel}; "
            f"{'; '.join(row.notes) or 'no reason is known'}"
            for row in wrong
        )
        what = f"are FP8 kernels on {report.backend}" if compiled else "could be FP8 kernels"
        raise ValueError(
            f"{len(asked) - len(wrong)} of {len(asked)} matmuls of FP8 operands {what}; not these:"
            f"\n{found}"
        )


def _matmuls(jaxpr: Any) -> Iterator[tuple[JaxprEqn, str, int | None]]:
    """The matmuls, their paths, and how often each is run, if that is known."""
    for eqn, around in nested_equations(jaxpr):
        name, outer = eqn.primitive.name, [e.primitive.name for e in around]
        # A kernel that the user wrote is not XLA's to choose.
        if name not in hlo.MATMULS or "pallas_call" in outer:
            continue
        path = "/".join(part for e in (*around, eqn) if (part := _compat.name_stack(e)))
        lengths = [e.params["length"] for e in around if e.primitive.name == "scan"]
        yield eqn, f"{path}/{name}", None if "while" in outer else math.prod(lengths)


def _as_traced(eqn: JaxprEqn, path: str, runs: int | None) -> Matmul:
    lhs, rhs, out = _avals(eqn)
    dtypes = [_short_name(aval.dtype) for aval in (lhs, rhs, out)]
    op = eqn.primitive.name
    if op == "block_dot_general":
        dtypes[:2] = [q.format.name for q in eqn.params["quantisers"]]
        reasons = [*_wrong_blocks(eqn, *dtypes)]
    else:
        reasons = [*_wrong_dtypes(*dtypes)]
    notes = []
    if op == "conv_general_dilated":
        sizes = _conv_sizes(eqn)
        reasons.append("a convolution: only dot_general is known to become an FP8 kernel")
    elif op == "ragged_dot_general":
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        dims = ragged.dot_dimension_numbers
        groups = ragged.rhs_group_dimensions
        sizes = hlo.product_sizes(lhs.shape, rhs.shape, dims, groups)
        reasons += _wrong_dims(lhs.ndim, rhs.ndim - len(groups), *dims)
        count = getattr(eqn.invars[2].aval, "shape", (1,))[-1]
        notes.append(f"a ragged dot: GPUs multiply each row with all {count} groups, masked")
    else:
        dims = eqn.params["dimension_numbers"]
        sizes = hlo.product_sizes(lhs.shape, rhs.shape, dims)
        reasons += _wrong_dims(lhs.ndim, rhs.ndim, *dims)
    notes = [*reasons, *notes]
    uneven = [name for name in "mkn" if getattr(sizes, name) % 16]
    if not reasons and uneven:
        notes.append("M, K or N is no multiple of 16: cuBLASLt pads, or may refuse")
    return Matmul(
        name=clean_name(path),
        path=path,
        line=_compat.layer_line(eqn),
        op=op,
        phase=phase_of(path),
        sizes=sizes,
        lhs=dtypes[0],
        rhs=dtypes[1],
        out=dtypes[2],
        runs=runs,
        eligible=not reasons,
        kernel="not compiled",
        is_fp8=None,
        notes=tuple(notes),
    )


def _avals(eqn: JaxprEqn) -> list[Any]:
    return [v.aval for v in (*eqn.invars[:2], *eqn.outvars)]


def _wrong_dtypes(lhs: str, rhs: str, out: str) -> Iterator[str]:
    if not (hlo.is_fp8(lhs) and hlo.is_fp8(rhs)):
        narrow = hlo.is_fp8(lhs) or hlo.is_fp8(rhs)
        yield f"{'only one operand is' if narrow else 'operands are not'} FP8"
        return
    other = [dtype for dtype in dict.fromkeys((lhs, rhs)) if dtype not in _FORMATS]
    if other:
        yield f"{' and '.join(other)}: NVIDIA GPUs know f8e4m3fn and f8e5m2 only"
    if lhs == rhs == "f8e5m2":
        yield "f8e5m2 x f8e5m2: one of the operands must be f8e4m3fn"
    if out not in _RESULTS:
        yield f"the result is {out}: set `preferred_element_type` to bfloat16, float16 or float32"


def _wrong_blocks(eqn: JaxprEqn, lhs: str, rhs: str, out: str) -> Iterator[str]:
    if not has_kernel(eqn.params["quantisers"]):
        yield f"no block-scaled kernel multiplies {lhs} x {rhs}"
    if out not in _RESULTS:
        yield f"the result is {out}: a block-scaled kernel has none like this"


def _wrong_dims(lhs_ndim: int, rhs_ndim: int, contract: Any, batch: Any) -> Iterator[str]:
    if not contract[0]:
        yield "nothing is contracted"
    for name, ndim, i in (("lhs", lhs_ndim, 0), ("rhs", rhs_ndim, 1)):
        if ndim == len(contract[i]) + len(batch[i]):
            yield f"{name} has no free dim: it is a vector"


def _conv_sizes(eqn: JaxprEqn) -> Sizes:
    spec, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    groups *= eqn.params["batch_group_count"]
    _, kernel, out = (aval.shape for aval in _avals(eqn))
    return Sizes(
        batch=groups,
        m=math.prod(out[a] for a in range(len(out)) if a != spec.out_spec[1]),
        k=math.prod(kernel[a] for a in range(len(kernel)) if a != spec.rhs_spec[0]),
        n=kernel[spec.rhs_spec[0]] // groups,
    )


def _short_name(dtype: Any) -> str:
    """Return a dtype in HLO's spelling."""
    name = jnp.dtype(dtype).name
    for long, short in (("bfloat", "bf"), ("float8_", "f8"), ("float", "f"), ("complex", "c")):
        name = name.replace(long, short)
    return name.replace("uint", "u").replace("int", "s")


def match(
    rows: Sequence[Matmul], program: hlo.Program
) -> tuple[tuple[Matmul, ...], tuple[str, ...]]:
    """Give each traced matmul the kernel that it was compiled to; return the other kernels too.

    By name and sizes; what is left, by name and padded sizes, by name, and at last by sizes.
    Several can share both: each then gets all that was found for them.
    """
    result = list(rows)
    others = {_key(name): opcodes for name, opcodes in program.others.items()}
    missing = list(range(len(rows)))
    left = list(program.matmuls)
    for names, multiple, note in (
        (True, 1, None),
        (True, 16, "compiled with sizes padded to multiples of 16"),
        (True, None, "compiled with other sizes: split over devices, or rewritten"),
        (False, 1, "the compiled matmul has another name: matched by its sizes"),
    ):
        groups = _group(((rows[i].path, rows[i].sizes, i) for i in missing), names, multiple)
        kernels = _group(((m.op_name, m.sizes, m) for m in left), names, multiple)
        for key in groups.keys() & kernels.keys():
            for i in groups[key]:
                opcodes = others.get(_key(rows[i].path), frozenset())
                result[i] = _as_compiled(rows[i], kernels[key], len(groups[key]), note, opcodes)
            missing = [i for i in missing if i not in groups[key]]
            left = [m for m in left if all(m is not k for k in kernels[key])]
    for i in missing:
        opcodes = others.get(_key(rows[i].path), frozenset())
        result[i] = _without_kernel(rows[i], opcodes)
    return tuple(result), tuple(m.kernel for m in left)


def _key(path: str) -> tuple[str, ...]:
    return (phase_of(path), *scopes(path)[:-1])


def _group(
    items: Iterable[tuple[str, Sizes | None, Any]], names: bool, multiple: int | None
) -> dict[Any, list[Any]]:
    """Group by name, and by sizes rounded up to a multiple unless that is None."""
    groups: dict[Any, list[Any]] = {}
    for path, sizes, item in items:
        key: tuple[Any, ...] = _key(path) if names else ()
        if multiple is not None:
            if sizes is None:
                continue
            m, k, n = (-(-size // multiple) for size in (sizes.m, sizes.k, sizes.n))
            # XLA may swap the operands, and so M and N.
            key = (*key, sizes.batch, k, min(m, n), max(m, n))
        groups.setdefault(key, []).append(item)
    return groups


def _as_compiled(
    row: Matmul,
    found: list[hlo.CompiledMatmul],
    sharing: int,
    note: str | None,
    opcodes: frozenset[str],
) -> Matmul:
    """A matmul and what was found for it; `opcodes` are those of other code of its name."""
    known = any(m.sizes for m in found)  # XLA's text does not tell those of a convolution
    notes = [*row.notes, *([note] if note and known else [])]
    kernels = list(dict.fromkeys(m.kernel for m in found))
    answers = {m.is_fp8 for m in found}
    is_fp8 = answers.pop() if len(answers) == 1 else None
    if len(kernels) > 1:
        notes.append("several kernels have this name and these sizes")
    if len(found) < sharing:
        # XLA merges matmuls of one operand; a product with a vector may be no matmul any more.
        is_fp8 = None if opcodes & _NO_MATMUL else is_fp8
        notes.append("fewer compiled than traced under this name: some were merged or dropped")
    if row.is_of_blocks and is_fp8 is False:
        wide = " and ".join(dict.fromkeys(dtype for m in found for dtype in (m.lhs, m.rhs)))
        notes.append(f"written out, with elements times block scales in {wide}: {_BLACKWELL}")
    elif row.has_fp8_operands and is_fp8 is False:
        to = " and ".join(dict.fromkeys(dtype for m in found for dtype in (m.lhs, m.rhs)))
        notes.append(f"FP8 operands were converted to {to}")
    return dataclasses.replace(row, kernel=" or ".join(kernels), is_fp8=is_fp8, notes=tuple(notes))


def _without_kernel(row: Matmul, opcodes: frozenset[str]) -> Matmul:
    if opcodes & _NO_MATMUL:
        is_fp8, kernel = False, "no matmul"
        note = f"compiled to other code: {', '.join(sorted(opcodes))}"
    else:
        is_fp8, kernel = None, "not found"
        note = "not found in the compiled program: fused, merged or dropped"
    return dataclasses.replace(row, kernel=kernel, is_fp8=is_fp8, notes=(*row.notes, note))
