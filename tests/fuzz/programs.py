"""Random programs: inputs, statements and a wrapper, as source that can be printed and run."""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import ScaledArray
from tests.fuzz import catalogue

DTYPES = ("float32", "float16", "bfloat16", "mixed")
WRAPPERS = ("plain", "jit", "grad", "jvp", "vmap", "scan", "while", "cond", "remat")
FLOATS = ("float32", "float16", "bfloat16")

HEADER = """\
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_scalify as jsa
"""
TOTAL = """
def total(outputs):
    outputs = [jnp.asarray(o) for o in outputs]
    return sum(jnp.sum(o) for o in outputs if jnp.issubdtype(o.dtype, jnp.floating))
"""
CARRY = """
def carry(x, outputs):
    for o in outputs:
        if jnp.shape(o) == x.shape and jnp.issubdtype(jnp.asarray(o).dtype, jnp.floating):
            return jnp.asarray(o, x.dtype)
    return x * 0.5
"""


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument of a program.

    Attributes:
        name: `x0` for floats, `n0` for integers, `m0` for masks.
        data: numbers that float16, bfloat16 and float32 hold exactly; integers; bools.
        dtype: by name.
        scale: None for a plain array, a float for a static scale, an array for a dynamic one.
        shift: the stored data is `data * 2.0**shift`.
        stacked: whether `vmap` or `scan` runs over the first axis.
    """

    name: str
    data: np.ndarray
    dtype: str
    scale: float | np.ndarray | None = None
    shift: int = 0
    stacked: bool = False

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype inside of the wrapper."""
        return jax.ShapeDtypeStruct(self.data.shape[self.stacked :], self.dtype)

    def stored(self) -> np.ndarray:
        """The data, in the dtype of the input."""
        data = self.data * 2.0**self.shift if self.is_float else self.data
        return data.astype(jnp.dtype(self.dtype))

    def argument(self) -> Any:
        """What the scalified function gets."""
        data = jnp.asarray(self.stored())
        if self.scale is None:
            return data
        static = isinstance(self.scale, float)
        return ScaledArray(data, self.scale if static else jnp.asarray(self.scale, jnp.float32))

    def value(self) -> np.ndarray:
        """What the scalified function computes with: in float64 if it is a float."""
        if not self.is_float:
            return self.data.astype(self.dtype)
        data = self.stored().astype(np.float64)
        scale = np.asarray(1.0 if self.scale is None else self.scale, np.float64)
        return data * scale.reshape(
            scale.shape + (1,) * (data.ndim - scale.ndim) * (scale.ndim > 0)
        )

    def code(self) -> str:
        """Source of the argument."""
        if self.data.size:
            data = f"jnp.array({_numbers(self.data)}, jnp.{self.dtype.replace('bool', 'bool_')})"
        else:
            data = f"jnp.zeros({self.data.shape}, jnp.{self.dtype})"
        if self.shift:
            data += f" * 2.0**{self.shift}"
        if self.scale is None:
            return data
        if isinstance(self.scale, float):
            return f"jsa.ScaledArray({data}, {_power(self.scale)})"
        if self.scale.ndim:
            powers = ", ".join(_power(s) for s in self.scale.ravel())
            return f"jsa.ScaledArray({data}, jnp.array([{powers}]).reshape({self.scale.shape}))"
        return f"jsa.ScaledArray({data}, jnp.float32({_power(self.scale)}))"


def _numbers(data: np.ndarray) -> str:
    if data.ndim:
        return "[" + ", ".join(_numbers(d) for d in data) + "]"
    return f"{data.item():g}" if data.dtype.kind == "f" else repr(data.item())


def _power(scale: Any) -> str:
    mantissa, exponent = np.frexp(float(scale))
    return f"2.0**{exponent - 1}" if mantissa == 0.5 and abs(exponent) > 8 else f"{float(scale)!r}"


_BASE = re.compile(r"(?<![\w.])([xnmr]\d+)")


@dataclasses.dataclass(frozen=True)
class Statement:
    """`target = source`.

    Attributes:
        dtype: the narrowest of its floating results, or "".
        moves: whether elements of one operand are moved, and nothing is computed.
    """

    target: str
    source: str
    dtype: str
    moves: bool = False

    def uses(self) -> set[str]:
        """Names of the variables in the source."""
        return set(_BASE.findall(self.source))


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of inputs, and how it is called.

    Attributes:
        inputs: floats first.
        statements: in order.
        outputs: variables, or elements of them as `r1[0]`.
        wrapper: one of `WRAPPERS`.
        jitted: whether the scalified function is.
    """

    inputs: tuple[Input, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    wrapper: str
    jitted: bool

    def dtypes(self) -> set[str]:
        """The floating dtypes of inputs and results."""
        found = {i.dtype for i in self.inputs if i.is_float}
        return found | {s.dtype for s in self.statements if s.dtype}

    def inputs_of(self, leaf: int, leaves: int) -> set[str]:
        """The inputs that one of the leaves depends on; all of them if that is not known."""
        names = {i.name for i in self.inputs}
        if self.wrapper not in ("plain", "jit", "vmap") or len(self.outputs) != leaves:
            return names
        needed = Statement("", self.outputs[leaf], "").uses()
        for statement in reversed(self.statements):
            if statement.target in needed:
                needed |= statement.uses()
        return names & needed

    def definitions(self) -> str:
        """Source of `g`: the function in its wrapper."""
        arguments = ", ".join(i.name for i in self.inputs)
        lines = [f"def f({arguments}):"]
        lines += [f"    {s.target} = {s.source}" for s in self.statements]
        lines.append(f"    return ({', '.join(self.outputs)},)")
        return "\n".join(lines) + "\n" + self._wrapper(arguments)

    def _wrapper(self, arguments: str) -> str:
        floats = [i.name for i in self.inputs if i.is_float]
        free = ", ".join(floats)
        if self.wrapper == "plain":
            return "\n\ng = f\n"
        if self.wrapper == "jit":
            return "\n\ng = jax.jit(f)\n"
        if self.wrapper == "vmap":
            axes = tuple(0 if i.stacked else None for i in self.inputs)
            return f"\n\ng = jax.vmap(f, {axes})\n"
        if self.wrapper in ("grad", "remat"):
            call = (
                f"jax.checkpoint(f)({arguments})" if self.wrapper == "remat" else f"f({arguments})"
            )
            numbers = tuple(range(len(floats)))
            body = f"    return jax.grad(lambda {free}: total({call}), {numbers})({free})\n"
            return f"\n{TOTAL}\n\ndef g({arguments}):\n{body}"
        if self.wrapper == "jvp":
            body = f"    return jax.jvp(lambda {free}: f({arguments}), ({free},), ({free},))\n"
            return f"\n\ndef g({arguments}):\n{body}"
        first = floats[0]
        if self.wrapper == "cond":
            other = "lambda *args: tuple(jnp.ones_like(o) for o in f(*args))"
            return (
                f"\n\ndef g({arguments}):\n"
                f"    return lax.cond(jnp.sum({first}) > 0, f, {other}, {arguments})\n"
            )
        if self.wrapper == "scan":
            second = [n for n, i in zip(floats, self.inputs) if i.stacked]
            over = f"{second[0]}, length=2" if second else "None, length=2"
            step = second[0] if second else "_"
            body = (
                f"    def step({first}, {step}):\n"
                f"        outputs = f({arguments})\n"
                f"        return carry({first}, outputs), outputs\n\n"
                f"    return lax.scan(step, {first}, {over})\n"
            )
        else:
            body = (
                "    def step(state):\n"
                f"        k, {first} = state\n"
                f"        return k + 1, carry({first}, f({arguments}))\n\n"
                f"    return lax.while_loop(lambda state: state[0] < 2, step, (0, {first}))[1]\n"
            )
        return f"\n{CARRY}\n\ndef g({arguments}):\n{body}"

    def code(self) -> str:
        """Runnable source: imports, inputs, function, what is got and expected."""
        inputs = "".join(f"{i.name} = {i.code()}\n" for i in self.inputs)
        arguments = ", ".join(i.name for i in self.inputs)
        run = "jax.jit(jsa.scalify(g))" if self.jitted else "jsa.scalify(g)"
        header = HEADER
        if "optax." in self.definitions():
            header = HEADER.replace("from jax", "import optax\nfrom jax")
        return (
            f"{header}\n\n{self.definitions()}\n{inputs}"
            f'print("got", jsa.asarray({run}({arguments}), jnp.float32))\n'
            f'print("expected", g(*jsa.asarray(({arguments},), jnp.float32)))\n'
        )


def load(source: str) -> Any:
    """The function `g` that definitions define."""
    scope = {"jax": jax, "jnp": jnp, "np": np, "lax": lax}
    if "optax." in source:
        import optax

        scope["optax"] = optax
    exec(compile(source, "<fuzz>", "exec"), scope)  # noqa: S102
    return scope["g"]


class Discarded(Exception):
    """Plain JAX refuses the program."""


def generate(seed: int, index: int) -> Program:
    """Program number `index` of a seed: it depends on nothing else."""
    for attempt in range(50):
        rng = np.random.default_rng((seed, index, attempt))
        try:
            return _Writer(rng, DTYPES[index % 4]).program()
        except Discarded:
            continue
    raise RuntimeError(f"No program of seed {seed} has the index {index}.")


def is_taken(template: str, dtype: str, seed: int) -> bool:
    """Tell whether JAX takes a statement with operands that are chosen at random."""
    writer = _Writer(np.random.default_rng(seed), dtype)
    writer.add(template)
    return len(writer.statements) == 1


_SHAPES = {
    "x": [(3, 4), (3, 4), (3, 4), (4,), (3,), (), (3, 3), (0, 4), (3, 1), (2, 3, 4)],
    "a": [(3, 4), (3, 4), (4,), (3,), (3, 3), (2, 3, 4)],
    "v": [(4,), (3,)],
    "A": [(3, 4), (3, 4), (3, 3), (4, 3)],
    "S": [(3, 3)],
    "T": [(2, 3, 4)],
    "t": [()],
    "s": [()],
    "V3": [(3,)],
    "v4": [(4,)],
    "V2": [(2,)],
    "A4": [(3, 4)],
    "A43": [(4, 3)],
    "T32": [(2, 3, 2)],
    "Q": [(1, 3, 2, 4)],
    "I": [(1, 4, 4, 2)],
    "K": [(2, 2, 2, 3)],
    "X": [(1, 2, 4, 4)],
}
_FITS = {
    "x": lambda s: True,
    "a": lambda s: len(s) > 0 and 0 not in s,
    "v": lambda s: len(s) == 1 and s[0] in (3, 4),
    "A": lambda s: len(s) == 2 and 0 not in s and s[1] > 1,
}
_LIKE_X = {"p": "jnp.abs({})", "u": "jnp.clip({}, -0.9, 0.9)"}
_OFF = 8  # so many powers of two data of float16 may lie beside its scale
_FRESH = ("c", "h", "V3")  # may differ from place to place
_ARRAYS = re.compile(r"\{([a-zA-Z]\d*)(?<![{nikbqcdh])\}")
_BRACES = re.compile(r"\{(\w+)\}")


class _Writer:
    """Writes one program; every choice is made by its generator."""

    def __init__(self, rng: np.random.Generator, dtype: str) -> None:
        self.rng = rng
        self.dtype = dtype
        self.wrapper = WRAPPERS[rng.integers(len(WRAPPERS))]
        self.inputs: list[Input] = []
        self.avals: dict[str, Any] = {}
        self.statements: list[Statement] = []

    def choose(self, options: Any) -> Any:
        return options[self.rng.integers(len(options))]

    def program(self) -> Program:
        table = catalogue.statements()
        self.input("x", self.choose(_SHAPES["x"]))
        count = int(self.rng.integers(2, 7))
        for _ in range(4 * count):
            if len(self.statements) == count:
                break
            self.add(self.choose(table))
        program = self.finish()
        check_plain(program)
        return program

    def add(self, template: str) -> None:
        """Fill in a statement and keep it if plain JAX takes it."""
        before = list(self.inputs)
        source = self.fill(template)
        target = f"r{len(self.statements)}"
        bases = sorted(set(_BASE.findall(source)))
        scope = {b: self.whole[b] if b in self.whole else self.avals[b] for b in bases}
        try:
            run = load(f"def g({', '.join(bases)}):\n    return {source}\n")
            result = jax.eval_shape(run, *scope.values())
            leaves = _named_leaves(target, result)
        except Exception:  # whatever plain JAX says: another statement
            self.forget(before)
            return
        floats = [str(a.dtype) for a in leaves.values() if jnp.issubdtype(a.dtype, jnp.inexact)]
        if not leaves or any(jnp.issubdtype(a.dtype, jnp.complexfloating) for a in leaves.values()):
            self.forget(before)
            return
        narrowest = min(floats, key=lambda d: jnp.finfo(d).nmant, default="")
        self.statements.append(Statement(target, source, narrowest, template in catalogue.MOVES))
        self.whole[target] = result
        self.avals.update(leaves)

    @functools.cached_property
    def whole(self) -> dict[str, Any]:
        return {}

    def forget(self, inputs: list[Input]) -> None:
        for i in self.inputs:
            if i not in inputs:
                del self.avals[i.name]
        self.inputs = inputs

    def finish(self) -> Program:
        used = set().union(*(s.uses() for s in self.statements)) if self.statements else set()
        loose = [v for v in self.avals if v.startswith("r") and v.split("[")[0] not in used]
        if not loose:
            raise Discarded
        kept = used | {self.inputs[0].name}
        inputs = sorted((i for i in self.inputs if i.name in kept), key=lambda i: not i.is_float)
        if self.wrapper in ("grad", "remat", "jvp") and not any(
            jnp.issubdtype(self.avals[v].dtype, jnp.floating) for v in loose
        ):
            raise Discarded
        narrow = "float16" in [i.dtype for i in inputs] + [s.dtype for s in self.statements]
        if narrow and any(abs(i.shift) > _OFF for i in inputs):
            raise Discarded  # cast to float16, data that is far from 1 is lost whatever its scale
        return Program(
            tuple(inputs),
            tuple(self.statements),
            tuple(loose),
            self.wrapper,
            bool(self.rng.random() < 0.8),
        )

    def fill(self, template: str) -> str:
        """Replace the braces by variables."""
        shape, dtype, length, columns = None, None, None, None
        filled: dict[str, str] = {}

        def operand(match: re.Match) -> str:
            nonlocal shape, dtype, length, columns
            kind = match.group(1)
            if kind in filled and kind not in _FRESH:
                return filled[kind]
            if kind == "c":
                return "(" + self.choose(catalogue.CONSTANTS[dtype or "float16"].split()) + ")"
            if kind == "d":
                return "(" + self.choose(catalogue.EXPONENTS.split()) + ")"
            if kind == "h":
                return "jnp." + self.choose(FLOATS)
            if kind in "nikbq":
                where = {"n": (3,), "k": (), "q": ()}.get(kind, shape or ())
                name = self.integers(kind, where)
            elif kind in "yz":
                name = self.variable("x", lambda s: _broadcasts(s, shape), [shape])
            elif kind in "eg":
                name = self.variable("x", lambda s: s == shape, [shape], dtype)
            elif kind in "wVB":
                need = {"w": (length,), "V": (columns,), "B": (columns, 2)}[kind]
                name = self.variable(kind, lambda s: s == need, [need])
            else:
                shapes = _SHAPES["x" if kind in _LIKE_X else kind]
                fits = _FITS.get("x" if kind in _LIKE_X else kind, lambda s: s in shapes)
                name = self.variable(kind, fits, shapes)
            aval = self.avals[name]
            shape = aval.shape if shape is None else shape
            if dtype is None and jnp.issubdtype(aval.dtype, jnp.floating):
                dtype = str(aval.dtype)
            length = aval.shape[0] if kind == "v" else length
            columns = aval.shape[1] if kind == "A" else columns
            text = _LIKE_X.get(kind, "{}").format(name)
            filled[kind] = text
            return text

        # The shape and dtype of the first array tell what masks, integers and constants are right.
        return _BRACES.sub(operand, _ARRAYS.sub(operand, template))

    def variable(self, kind: str, fits: Any, shapes: Any, dtype: str | None = None) -> str:
        """A floating variable: mostly one that exists, the newest by preference."""
        found = [
            v
            for v, a in self.avals.items()
            if jnp.issubdtype(a.dtype, jnp.floating)
            and fits(a.shape)
            and (dtype is None or str(a.dtype) == dtype)
        ]
        full = len([i for i in self.inputs if i.is_float]) >= 4
        if found and (full or self.rng.random() < 0.8):
            newest = self.rng.random() < 0.5
            return found[-1] if newest else self.choose(found)
        return self.input(kind, tuple(self.choose(shapes)), dtype)

    def integers(self, kind: str, shape: tuple[int, ...]) -> str:
        """An integer or mask of a shape."""
        dtype = "bool" if kind in "bq" else "int32"
        found = [v for v, a in self.avals.items() if a.shape == shape and str(a.dtype) == dtype]
        found = [v for v in found if v[0] in "nm"]
        if found and self.rng.random() < 0.7:
            return self.choose(found)
        name = f"{'m' if dtype == 'bool' else 'n'}{len(self.inputs)}"
        stacked = self.wrapper == "vmap" and self.rng.random() < 0.5
        full = (2,) * stacked + shape
        data = self.rng.integers(0, 2 if dtype == "bool" else 3, size=full)
        data = np.asarray(data).astype(dtype)
        return self.append(Input(name, data, dtype, stacked=stacked))

    def append(self, new: Input) -> str:
        self.inputs.append(new)
        self.avals[new.name] = new.aval
        return new.name

    def input(self, kind: str, shape: tuple[int, ...], dtype: str | None = None) -> str:
        """A new floating input of random numbers, dtype and scale."""
        rng = self.rng
        dtype = dtype or (self.choose(FLOATS) if self.dtype == "mixed" else self.dtype)
        floats = len([i for i in self.inputs if i.is_float])
        stacked = (self.wrapper == "vmap" and (not floats or rng.random() < 0.8)) or (
            self.wrapper == "scan" and floats == 1
        )
        full = (2,) * stacked + shape
        data = np.round(np.clip(rng.normal(size=full), -3.5, 3.5) * 32) / 32
        if kind == "p":
            data = np.abs(data) + 0.25
        data, scale, shift = self.scale(np.asarray(data), dtype, stacked)
        return self.append(Input(f"x{len(self.inputs)}", data, dtype, scale, shift, stacked))

    def scale(self, data: np.ndarray, dtype: str, stacked: bool) -> tuple[np.ndarray, Any, int]:
        rng = self.rng
        kinds = ["scalar"] * 6 + ["axis"] * 3 + ["zero", "frozen", "frozen", "large", "small"]
        kinds += ["wide", "wide", "off", "off"]
        kinds += ["plain"] if self.inputs else []
        kinds += ["given"] if dtype != "float16" else []
        kind = self.choose(kinds)
        exponent = int(rng.integers(-4, 5))
        if kind == "axis" and data.ndim and data.size:
            axis = int(rng.integers(data.ndim))
            shape = tuple(n if a == axis else 1 for a, n in enumerate(data.shape))
            if stacked:
                shape = (2, *(n if rng.random() < 0.5 else 1 for n in data.shape[1:]))
            widest = self.choose([4, 4, 20])
            return data, 2.0 ** rng.integers(-widest, widest + 1, size=shape), 0
        if kind == "zero":
            return np.zeros_like(data), self.stack(0.0, stacked), 0
        if kind == "frozen" and not stacked:
            return data, 2.0 ** float(exponent), 0
        if kind in ("large", "small"):
            if not data.any():  # zeros that carry a stale scale: a limit that docs/limits.md tells
                data = np.ones_like(data)
            return data, self.stack(2.0 ** (40 if kind == "large" else -40), stacked), 0
        if kind == "wide":  # 1e-12 to 1e12
            return data, self.stack(2.0 ** rng.integers(-40, 41), stacked), 0
        if kind == "off":  # numbers of ordinary size, whose data has drifted from its scale
            shift = self.choose([-_OFF, -4, 4, _OFF])
            return data, self.stack(2.0 ** (int(rng.integers(-2, 3)) - shift), stacked), shift
        if kind == "given":
            sign = self.choose([-40, -20, -10, 10, 20, 40])
            return data, self.stack(2.0**sign, stacked), -sign
        if kind == "plain":
            return data, None, 0
        return data, self.stack(2.0**exponent, stacked), 0

    @staticmethod
    def stack(scale: float, stacked: bool) -> np.ndarray:
        return np.full((2,) if stacked else (), scale, np.float64)


def _broadcasts(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(shape, other)
    except ValueError:
        return False
    return True


def _named_leaves(target: str, result: Any) -> dict[str, Any]:
    if isinstance(result, (tuple, list)):
        found = {f"{target}[{k}]": a for k, a in enumerate(result)}
    else:
        found = {target: result}
    if any(not hasattr(a, "shape") for a in found.values()):
        raise TypeError("Results of results have no names.")
    return found


def check_plain(program: Program) -> tuple[Any, ...]:
    """Return the avals of the plain program's results.

    Raises:
        Discarded: if JAX does not trace it.
    """
    structs = (jax.ShapeDtypeStruct(i.data.shape, i.dtype) for i in program.inputs)
    try:
        result = jax.eval_shape(load(program.definitions()), *structs)
    except Exception as error:
        raise Discarded(str(error)) from error
    return tuple(a for a in jax.tree.leaves(result) if a.dtype != jax.dtypes.float0)


def check_avals(program: Program) -> dict[str, Any]:
    """Return shapes and dtypes of all variables inside the wrapper."""
    names = [i.name for i in program.inputs]
    everything = dataclasses.replace(
        program, outputs=tuple(s.target for s in program.statements), wrapper="plain"
    )
    structs = [i.aval for i in program.inputs]
    results = jax.eval_shape(load(everything.definitions()), *structs)
    avals = dict(zip(names, structs))
    for s, result in zip(program.statements, results):
        avals |= _named_leaves(s.target, result)
    return avals


def fingerprint(program: Program) -> int:
    """A number that tells programs apart."""
    return zlib.crc32(program.code().encode())
