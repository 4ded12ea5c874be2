"""Random training steps that are repeated: what is fed back must not drift.

A step is a random program, whose floating inputs are the parameters and whose gradients are summed
results, and an optimizer that is put together at random from the lines below: clipping, moments,
an update, weights, an average of the weights. After `STEPS` steps each leaf of the state is looked
at:

- Its scale is at most `2**DRIFT` times the largest RMS that it had at any step, and at least
  `2**-DRIFT` times the last one, unless it is zero. What decays keeps its scale.
- It is finite where plain JAX is so, in float32 and in its dtype.
- Its value is near to that in float64: as near, up to a factor, as that of plain JAX in float32 or
  in its dtype, or of a state in float64 that is rounded to the dtype after each step.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_scalify as jsa
from tests.fuzz import catalogue
from tests.fuzz.noise import noisy_function
from tests.fuzz.programs import FLOATS, HEADER, Discarded, Program, _Writer, load
from tests.fuzz.running import Failure
from tests.fuzz.shrinking import shrink

STEPS = 50
DRIFT = 8
_FACTOR = 8.0
_RUNS = 4

# A gradient `g`, the norm `n` of all of them; the first line of each list is the simplest.
LINES = {
    "g": (
        "g",
        "jnp.where(n < 1, g, g / n)",
        "g * jnp.minimum(1.0, 1.0 / (n + 1e-3))",
        "g / jnp.where(n == 0, 1.0, n)",
        "jnp.clip(g, -1.0, 1.0)",
        "jnp.where(jnp.isfinite(n), g, 0.0)",
        "g / jnp.maximum(jnp.sqrt(jnp.mean(g * g)), 1e-3)",
    ),
    "m": (
        "m",
        "0.9 * m + 0.1 * g",
        "0.9 * m + g",
        "m + 0.1 * (g - m)",
        "jnp.where(k % 2 == 0, g, m)",
    ),
    "v": (
        "v",
        "0.99 * v + 0.01 * g * g",
        "v + g * g",
        "v + 0.01 * (jnp.square(g) - v)",
        "jnp.maximum(0.99 * v, jnp.square(g))",
        "0.99 * v + 0.01 * jnp.mean(g * g)",
    ),
    "u": (
        "g",
        "m",
        "m / (jnp.sqrt(v) + 1e-3)",
        "g * jax.lax.rsqrt(v + 1e-5)",
        "jnp.sign(m)",
        "jnp.where(v == 0, 0.0, m / jnp.sqrt(jnp.where(v == 0, 1.0, v)))",
        "g * jnp.minimum(1.0, 0.01 * jnp.linalg.norm(w) / (jnp.linalg.norm(g) + 1e-6))",
    ),
    "w": (
        "w - 0.01 * u",
        "0.999 * w - 0.01 * u",
        "w - 0.01 * (u + 0.1 * w)",
        "w + (-0.01) * u",
        "jnp.where(jnp.all(jnp.isfinite(u)), w - 0.01 * u, w)",
        "w * (1 - 0.01 * 0.1) - 0.01 / (1 + 0.1 * k) * u",
    ),
    "e": ("e", "0.9 * e + 0.1 * w", "e + (w - e) * 0.1", "jnp.where(k % 5 == 0, w, e)"),
}
# What parameters go through in models.
_FAMILIES = (
    *catalogue.NN,
    *catalogue.PRODUCTS,
    *catalogue.CHOICES,
    *catalogue.GUARDS,
    *catalogue.CLIPPING,
    *catalogue.MOMENTS,
    *catalogue.POLYNOMIALS,
)


@dataclasses.dataclass(frozen=True)
class Training:
    """A program whose gradients train its inputs.

    Attributes:
        program: the loss is the sum of its results.
        lines: by name, as in `LINES`.
    """

    program: Program
    lines: dict[str, str]

    def reads_zeros(self) -> bool:
        """Whether the update is of a moment that stays 0: its scale may be any."""
        used = set(re.findall(r"\b[mv]\b", self.lines["u"]))
        return any(self.lines[name] == name for name in used)

    def definitions(self) -> str:
        """Source of `g`: a step, of the state, integers, masks and the number of the step."""
        program = dataclasses.replace(self.program, wrapper="grad")
        gradients = re.sub(r"\bdef g\(", "def gradients(", program.definitions())
        count = len([i for i in program.inputs if i.is_float])
        body = "".join(f"        {name} = {line}\n" for name, line in self.lines.items())
        body = re.sub(r"\bn\b", "n_", body)
        return (
            f"{gradients}\n\n"
            "def g(state, others, k):\n"
            "    grads = gradients(*[leaf[0] for leaf in state], *others)\n"
            "    n = jnp.sqrt(sum(jnp.sum(jnp.square(g)).astype(jnp.float32) for g in grads))\n\n"
            "    def update(w, m, v, e, g):\n"
            "        n_ = n.astype(g.dtype)\n"
            f"{body}"
            "        new = (w, m, v, e)\n"
            "        return tuple(x.astype(g.dtype) for x in new)\n\n"
            f"    return [update(*state[i], grads[i]) for i in range({count})]\n"
        )

    def code(self) -> str:
        """Runnable source: prints log2(scale), log2(RMS) and the state, scalified and plain."""
        floats = ", ".join(i.code() for i in self.program.inputs if i.is_float)
        others = ", ".join(i.code() for i in self.program.inputs if not i.is_float)
        optax = "import optax\n" if "optax." in self.definitions() else ""
        return (
            f"{HEADER}{optax}\n\n{self.definitions()}\n\n"
            f"params = [{floats}]\nothers = [{others}]\n"
            "zero = lambda p: jsa.as_scaled_array(jnp.zeros(p.shape, p.dtype))\n"
            "state = [(p, zero(p), zero(p), p) for p in params]\n"
            "plain = jsa.asarray(state, jnp.float32)\n"
            "step, plain_step = jax.jit(jsa.scalify(g)), jax.jit(g)\n"
            f"for k in range({STEPS}):\n"
            "    state = step(state, others, jnp.int32(k))\n"
            "    plain = plain_step(plain, others, jnp.int32(k))\n"
            "for leaf, one in zip(state, plain):\n"
            "    for name, x, p in zip('wmve', leaf, one):\n"
            "        value = jsa.asarray(x, jnp.float32)\n"
            "        rms = jnp.sqrt(jnp.mean(jnp.square(value)))\n"
            "        print(name, jnp.log2(x.scale), jnp.log2(rms), value, 'expected', p)\n"
        )


class _Parameters(_Writer):
    """Writes the loss: its inputs have one dynamic scale each."""

    def scale(self, data: np.ndarray, dtype: str, stacked: bool) -> tuple[np.ndarray, Any, int]:
        rng = self.rng
        kind = self.choose(["near", "near", "near", "wide"])
        if not data.any():
            data = np.ones_like(data)
        exponent = rng.integers(-40, 41) if kind == "wide" else rng.integers(-2, 3)
        return data, np.asarray(2.0**exponent), 0

    def loss(self) -> Program:
        table = catalogue.statements()
        if self.rng.random() < 0.7:
            table = [t for t in _FAMILIES if t in set(table)]
        self.wrapper = "grad"
        self.input("x", self.choose([(3, 4), (4,), (3, 3)]))
        count = int(self.rng.integers(1, 4))
        for _ in range(4 * count):
            if len(self.statements) == count:
                break
            self.add(self.choose(table))
        program = self.finish()
        if any(i.data.size == 0 for i in program.inputs):
            raise Discarded
        return program


def generate_training(seed: int, index: int) -> Training:
    """Training number `index` of a seed."""
    for attempt in range(50):
        rng = np.random.default_rng((seed, index, attempt, 1))
        try:
            program = _Parameters(rng, FLOATS[index % 3]).loss()
        except Discarded:
            continue
        lines = {name: lines[rng.integers(len(lines))] for name, lines in LINES.items()}
        training = Training(program, lines)
        if training.reads_zeros():
            continue
        try:
            jax.eval_shape(load(training.definitions()), *_plain_state(training), jnp.int32(0))
        except Exception:
            continue
        return training
    raise RuntimeError(f"No training of seed {seed} has the index {index}.")


def _plain_state(training: Training, dtype: str = "") -> tuple[Any, Any]:
    floats = [i for i in training.program.inputs if i.is_float]
    params = [jnp.asarray(i.value(), dtype or i.dtype) for i in floats]
    others = [jnp.asarray(i.data) for i in training.program.inputs if not i.is_float]
    return [(p, jnp.zeros_like(p), jnp.zeros_like(p), p) for p in params], others


def _leaves(state: Any) -> list[np.ndarray]:
    return [np.asarray(x).astype(np.float64) for leaf in state for x in leaf]


def _run_plain(training: Training, dtype: str = "") -> list[np.ndarray]:
    """The state after all steps, in the program's dtypes or with floats of one dtype."""
    with jax.enable_x64(dtype == "float64"):
        state, others = _plain_state(training, dtype)
        try:
            step = jax.jit(load(_with_floats(training.definitions(), dtype)))
            for k in range(STEPS):
                state = step(state, others, jnp.int32(k))
        except Exception as error:
            raise Discarded(str(error)) from error
        return _leaves(state)


def _with_floats(source: str, dtype: str) -> str:
    return re.sub(r"jnp\.(float32|float16|bfloat16)\b", f"jnp.{dtype}", source) if dtype else source


def _run_noisy(training: Training) -> list[list[np.ndarray]]:
    """The states after all steps in float64, with noise on what is computed."""
    dtypes = training.program.dtypes()
    eps = max(float(jnp.finfo(d).eps) for d in dtypes)
    step = load(_with_floats(training.definitions(), "float64"))
    with jax.enable_x64(True):
        state, others = _plain_state(training, "float64")
        first, tree = jax.tree.flatten(state)

        def function(k: Any, *leaves: Any) -> list[Any]:
            return jax.tree.leaves(step(jax.tree.unflatten(tree, leaves), others, k))

        run = noisy_function(function, [jnp.int32(0), *first], eps, "float16" in dtypes)
        results = []
        for number in range(_RUNS):
            leaves = first
            for k in range(STEPS):
                leaves = run(np.float64(number), jnp.int32(k), *leaves)
            results.append([np.asarray(x) for x in leaves])
        return results


def check_training(training: Training) -> Failure | None:
    """Train, and return what is wrong with the state.

    Raises:
        Discarded: if plain JAX cannot run it.
    """
    want = _run_plain(training, "float64")
    plain = [_run_plain(training, "float32"), _run_plain(training)]
    others = plain + _run_noisy(training)
    try:
        state, largest = _run_scalified(training)
    except Exception as error:
        message = re.sub(r"\s+", " ", str(error))[:500]
        return Failure("raises", f"{type(error).__name__}: {message}")
    eps = max(float(jnp.finfo(d).eps) for d in training.program.dtypes())
    found = [x for leaf in state for x in leaf]
    for k, (x, w) in enumerate(zip(found, want, strict=True)):
        if not all(np.isfinite(o[j]).all() for o in [want, *others] for j in _with(k)):
            continue  # some ways to compute it leave the range
        name = f"{'wmve'[k % 4]}{k // 4}"
        got = np.asarray(jsa.asarray(x, jnp.float32), np.float64)
        with np.errstate(all="ignore"):
            limit = 16 * eps * np.max(np.abs(w)) + 2.0**-120
            limit = limit + _FACTOR * np.max([np.max(np.abs(o[k] - w)) for o in others])
            wrong = ~(np.abs(got - w) <= limit)
        if np.any(wrong):
            told = f"{name}: got {got[wrong]}, float64 gives {w[wrong]}"
            return Failure("value", f"{told}, plain float32 {plain[0][k][wrong]}", k)
        rms = float(np.sqrt(np.mean(np.square(got))))
        scale = float(np.max(np.asarray(getattr(x, "scale", 1.0))))
        low, high = 2.0**-DRIFT * rms, 2.0**DRIFT * largest[k]
        if rms > 2.0**-100 and not low <= scale <= high:
            told = f"the scale is {scale:.3g}, the RMS {rms:.3g}, and was at most {largest[k]:.3g}"
            return Failure("scale", f"{name}: {told}", k)
    return None


def _with(k: int) -> range:
    """The leaves of the same parameter."""
    return range(k - k % 4, k - k % 4 + 4)


def _run_scalified(training: Training) -> tuple[Any, np.ndarray]:
    """The state after all steps, and the largest RMS of each leaf."""
    params = [i.argument() for i in training.program.inputs if i.is_float]
    others = [jnp.asarray(i.data) for i in training.program.inputs if not i.is_float]

    def zeros(p: Any) -> Any:
        return jsa.as_scaled_array(jnp.zeros(p.shape, p.dtype))

    state = [(p, zeros(p), zeros(p), p) for p in jsa.as_scaled_array(params)]
    scalified = jsa.scalify(load(training.definitions()))

    @jax.jit
    def step(state: Any, k: Any) -> Any:
        state = scalified(state, others, k)
        values = jax.tree.leaves(jsa.asarray(state, jnp.float32))
        return state, jnp.stack([_rms(x) for x in values])

    largest = np.asarray([_rms(x) for x in jax.tree.leaves(jsa.asarray(state, jnp.float32))])
    for k in range(STEPS):
        state, rms = step(state, jnp.int32(k))
        largest = np.fmax(largest, np.asarray(rms))
    return state, largest


def _rms(x: Any) -> Any:
    largest = jnp.maximum(jnp.max(jnp.abs(x)), 2.0**-126)
    return largest * jnp.sqrt(jnp.mean(jnp.square(x / largest)))


def shrink_training(training: Training, failure: Failure) -> tuple[Training, Failure]:
    """Return a smaller training that fails in the same way, and its failure."""
    for name, lines in LINES.items():
        for line in lines[: lines.index(training.lines[name])]:
            smaller = dataclasses.replace(training, lines={**training.lines, name: line})
            if smaller.reads_zeros():
                continue
            try:
                found = check_training(smaller)
            except Discarded:
                continue
            if found is not None and found.kind == failure.kind:
                training, failure = smaller, found
                break

    def check(program: Program) -> Failure | None:
        if not all(isinstance(i.scale, np.ndarray) for i in program.inputs if i.is_float):
            raise Discarded
        return check_training(dataclasses.replace(training, program=program))

    program, failure = shrink(training.program, failure, check, attempts=60)
    return dataclasses.replace(training, program=program), failure
