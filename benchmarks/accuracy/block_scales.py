"""With data of unit size, how much do block scales still buy?

    python -m benchmarks.accuracy.block_scales  # errors of matmuls; losses of 2 models, 3 seeds
    python -m benchmarks.accuracy.block_scales --part errors
    python -m benchmarks.accuracy.block_scales --part losses --models llama --seeds 0 --steps 100

`errors`: the operands and cotangents of twelve linear layers of a model that float32 has trained
for some steps, and for each format how far the three products of a layer are from float64, relative
to their norm: the mean over layers, and the worst. `losses`: the held-out loss after training with
all linear layers in a format, in percent of float32's.

Each format is taken `plain`, as a library without scales does (block formats need none, NVFP4 takes
one of the whole from the largest element), and with `scalify`, whose scales are static powers of
two: of a tensor, or of rows and columns (`axis`). Every finished cell is kept in
`benchmarks/results/block_scales-jax<version>.json`: a run that was stopped goes on with the next.
"""

import argparse
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from rich import box
from rich.console import Console
from rich.table import Table

import jax_scalify as jsa
from benchmarks.accuracy.parity import LEARNING_RATES, commit, find_models
from benchmarks.accuracy.parity_steps import make_optimizer
from benchmarks.accuracy.scale_models import PLAIN
from benchmarks.cells import Cells, Store
from benchmarks.paths import RESULTS

MODELS = ("gpt4", "llama")
SELECT = jsa.fp8.all_of(jsa.fp8.linear_layers, jsa.fp8.skip_head)
HYBRID = dict(forward_dtype=jnp.float8_e4m3fn, backward_dtype=jnp.float8_e5m2)


def both(format: Any) -> dict[str, Any]:
    """The same format in both passes."""
    return dict(forward_dtype=format, backward_dtype=format)


def _pretraining() -> dict[str, Any]:
    """NVIDIA's recipe (arXiv 2509.25149): square blocks, stochastic gradients, Hadamard."""
    nvfp4 = functools.partial(jsa.BlockFormat, "nvfp4")
    formats = dict(forward_dtype=(nvfp4(), nvfp4(square=True)))
    return formats | dict(backward_dtype=nvfp4(rounding="stochastic"), hadamard=16)


FORMATS = {
    "bfloat16": both(jnp.bfloat16),
    "fp8": HYBRID,
    "fp8 e4m3": both(jnp.float8_e4m3fn),
    "mxfp8": both("mxfp8"),
    "mxfp8 floor": both(jsa.BlockFormat("mxfp8", scale_rounding="floor")),
    "mxfp8 e5m2": both("mxfp8_e5m2"),
    "mxfp4": both("mxfp4"),
    "mxfp4 floor": both(jsa.BlockFormat("mxfp4", scale_rounding="floor")),
    "nvfp4": both("nvfp4"),
    "nvfp4 tensor": both(jsa.BlockFormat("nvfp4", tensor_scale=True)),
    "nvfp4 no tensor": both(jsa.BlockFormat("nvfp4", tensor_scale=False)),
    "nvfp4 square": dict(
        forward_dtype=("nvfp4", jsa.BlockFormat("nvfp4", square=True)), backward_dtype="nvfp4"
    ),
    "nvfp4 stochastic": dict(
        forward_dtype="nvfp4", backward_dtype=jsa.BlockFormat("nvfp4", rounding="stochastic")
    ),
    "nvfp4 hadamard": both("nvfp4") | dict(hadamard=16),
    "nvfp4 recipe": _pretraining(),
    # One pass at a time in 4 bits, the other one in FP8.
    "nvfp4 forward": dict(forward_dtype="nvfp4", backward_dtype=jnp.float8_e4m3fn),
    "nvfp4 backward": dict(forward_dtype=jnp.float8_e4m3fn, backward_dtype="nvfp4"),
    # The last layer in float32.
    "nvfp4 but head": both("nvfp4") | dict(select=SELECT),
    "nvfp4 recipe but head": _pretraining() | dict(select=SELECT),
}
OF_AXES = ("fp8", "fp8 e4m3")
WAYS = ("plain", "scalify", "axis")
# What is trained. Left out is what an error of a product decides: E4M3 without scales loses all of
# a gradient; recipes of 4 bits end alike with our scales and without.
OF_LOSSES = {
    "fp8": WAYS,
    "fp8 e4m3": ("scalify",),
    "mxfp8": ("plain", "scalify"),
    "mxfp4": ("plain", "scalify"),
    "nvfp4": ("plain", "scalify"),
    "nvfp4 tensor": ("scalify",),
    "nvfp4 recipe": ("scalify",),
    "nvfp4 recipe but head": ("scalify",),
}
# And of the GPT, whose steps are quicker.
OF_GPT = {
    "nvfp4 no tensor": ("plain",),
    "nvfp4 forward": ("scalify",),
    "nvfp4 backward": ("scalify",),
}
LAYERS = 12  # of a model, evenly, whose products are measured
GOALS = {
    "mxfp8": 0.05,
    "nvfp4": 1.0,
    "nvfp4 recipe": 1.0,
    "nvfp4 recipe but head": 1.0,
}  # how far the loss may be, in %
HELD_OUT_BATCHES = 32


# The operands of a model's linear layers


class Recorder:
    """A `dot_general` that keeps its operands and the cotangent of each call."""

    def __init__(self) -> None:
        self.calls: dict[int, dict[str, Any]] = {}

    def __call__(self, lhs: Any, rhs: Any, dims: Any, **types: Any) -> Any:
        """Multiply as JAX does."""
        number = len(self.calls)
        self.calls[number] = {"dims": dims}
        types = {n: types.get(n) for n in ("precision", "preferred_element_type")}

        def keep(**arrays: Any) -> None:
            self.calls[number] |= {n: np.asarray(x, np.float32) for n, x in arrays.items()}

        @jax.custom_vjp
        def product(lhs: Any, rhs: Any) -> Any:
            return lax.dot_general(lhs, rhs, dims, **types)

        def forward(lhs: Any, rhs: Any) -> Any:
            jax.debug.callback(keep, lhs=lhs, rhs=rhs)
            return jax.vjp(lambda a, b: lax.dot_general(a, b, dims, **types), lhs, rhs)

        def backward(pull: Any, cotangent: Any) -> Any:
            jax.debug.callback(keep, cotangent=cotangent)
            return pull(cotangent)

        product.defvjp(forward, backward)
        return product(lhs, rhs)


@functools.cache
def record(model: str, steps: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Operands `(m, k)`, `(k, n)` and cotangents `(m, n)` of linear layers."""
    first_state, step_of = make_step(model, "float32", "plain", max(steps, 1))
    known, state = find_models()[model], first_state(0)
    for step in range(steps):
        state, _ = step_of(state, known.batch(0, step))
    params, other, _ = state
    recorder = Recorder()
    with mock.patch.object(jsa.fp8, "DotGeneral", lambda **_: recorder):
        loss = jsa.fp8_matmuls(
            lambda p: known.loss(p, other, known.batch(0, steps), PLAIN, jnp.float32)[0]
        )
        jax.block_until_ready(jax.grad(loss)(params))
        jax.effects_barrier()
    calls = [call for call in recorder.calls.values() if "cotangent" in call]
    return [_as_matrices(**call) for call in calls[:: math.ceil(len(calls) / LAYERS)]]


def _as_matrices(lhs: Any, rhs: Any, cotangent: Any, dims: Any) -> Any:
    (lhs_contract, rhs_contract), _ = dims
    lhs = np.moveaxis(lhs, lhs_contract, range(-len(lhs_contract), 0))
    rhs = np.moveaxis(rhs, rhs_contract, range(len(rhs_contract)))
    k = math.prod(rhs.shape[: len(rhs_contract)])
    lhs, rhs = lhs.reshape(-1, k), rhs.reshape(k, -1)
    return lhs, rhs, cotangent.reshape(len(lhs), -1)


# Errors of products


def errors(model: str, format: str, way: str, steps: int) -> dict:
    """How far the products of each layer are from float64, relative to their norms."""

    def products(lhs: Any, rhs: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(
            functools.partial(jsa.nn.matmul, **FORMATS[format], preferred_element_type=jnp.float32),
            lhs,
            rhs,
        )
        return out, *pull(cotangent)

    plain, scalified = jax.jit(products), jax.jit(jsa.scalify(products))
    found: list[list[float]] = []
    for lhs, rhs, cotangent in record(model, steps):
        operands = [jnp.asarray(x) for x in (lhs, rhs, cotangent)]
        if way == "plain":
            results = plain(*operands)
        else:
            axes = (0, 1, 0) if way == "axis" else (None,) * 3
            scaled = [
                jsa.as_scaled_array(x, "rms", axis=axis)
                for x, axis in zip(operands, axes, strict=True)
            ]
            results = jsa.asarray(scalified(*scaled), jnp.float32)
        wide = [x.astype(np.float64) for x in (lhs, rhs, cotangent)]
        wanted = wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2]
        pairs = zip(results, wanted, strict=True)
        found.append([float(np.linalg.norm(g - w) / np.linalg.norm(w)) for g, w in pairs])
    names = ("forward", "input", "weight")
    columns = dict(zip(names, zip(*found, strict=True), strict=True))
    return {name: [statistics.fmean(x), max(x)] for name, x in columns.items()}


# Losses


@functools.lru_cache(maxsize=1)
def make_step(model: str, format: str, way: str, steps: int) -> tuple[Callable, Callable]:
    """Return `first_state(seed)` and `step(state, batch) -> (state, loss)`; state in float32."""
    known = find_models()[model]
    optimizer = make_optimizer(LEARNING_RATES[model], steps)

    def loss_of(params: Any, other: Any, batch: dict) -> Any:
        loss, other = known.loss(params, other, batch, PLAIN, jnp.float32)
        return loss.astype(jnp.float32), other

    if format != "float32":
        loss_of = jsa.fp8_matmuls(loss_of, **FORMATS[format])

    def update(state: Any, batch: dict) -> tuple[Any, jax.Array]:
        params, other, opt_state = state
        grad = jax.value_and_grad(loss_of, has_aux=True)
        (loss, new_other), grads = grad(params, other, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        if way != "plain":
            new, new_other = jsa.match_scales((new, new_other), (params, other))
        return (new, new_other, opt_state), loss

    def first_state(seed: int) -> Any:
        params, other = known.init(seed)
        state = params, other, optimizer.init(params)
        if way == "plain":
            return state
        params = jsa.as_scaled_array(params, "rms", axis=columns if way == "axis" else None)
        return params, *jsa.as_scaled_array(state[1:])

    return first_state, jax.jit(update if way == "plain" else jsa.scalify(update))


def columns(path: Any, leaf: Any) -> int | None:
    """Return the axis along which a weight has scales: those of each of a kernel's outputs."""
    return leaf.ndim - 1 if leaf.ndim > 1 else None


def train(model: str, format: str, way: str, seed: int, steps: int) -> dict:
    """Train one cell: its held-out loss."""
    started = time.monotonic()
    first_state, step_of = make_step(model, format, way, steps)
    known, state = find_models()[model], first_state(seed)
    for step in range(steps):
        state, _ = step_of(state, known.batch(seed, step))
    held_out = (known.batch(0, i, held_out=True) for i in range(HELD_OUT_BATCHES))
    losses = [float(step_of(state, batch)[1]) for batch in held_out]
    seconds = round(time.monotonic() - started, 1)
    return {"loss": statistics.fmean(losses), "seconds": seconds, "commit": commit()}


# Tables


def table_of_errors(cells: dict[str, dict], model: str) -> Table:
    """The errors of a model's layers in percent: mean and, behind it, the worst."""
    table = Table(title=f"{model}: errors of products, %", box=box.SIMPLE)
    names = ("forward", "input", "weight")
    for name in ("format", "scales", *names):
        table.add_column(name, justify="right" if name in names else "left")
    for format, way in itertools.product(FORMATS, WAYS):
        cell = cells.get(f"errors/{model}/{format}/{way}")
        if cell is not None:
            numbers = ([100 * x for x in cell[name]] for name in names)
            table.add_row(format, way, *("{:.2f} ({:.2f})".format(*pair) for pair in numbers))
    return table


def table_of_losses(cells: dict[str, dict]) -> Table:
    """How far losses are from float32's, seed by seed."""
    table = Table(title="held-out loss, % of float32's", box=box.SIMPLE)
    for name in ("model", "format", "way", "seeds", "loss", "gap", "worst", "goal"):
        table.add_column(name, justify="left" if name in ("model", "format", "way") else "right")
    keys = {tuple(k.split("/")[1:4]) for k in cells if k.startswith("losses/")}
    for model, format, way in sorted(keys):
        found = {
            k.rpartition("/")[2]: c
            for k, c in cells.items()
            if k.startswith(f"losses/{model}/{format}/{way}/")
        }
        reference = {seed: cells.get(f"losses/{model}/float32/plain/{seed}") for seed in found}
        gaps = [100 * (c["loss"] / r["loss"] - 1) for s, c in found.items() if (r := reference[s])]
        if not gaps:
            continue
        mean, goal = statistics.fmean(gaps), GOALS.get(format)
        verdict = "" if goal is None else f"{goal}% {'ok' if mean <= goal else 'MISSED'}"
        loss = statistics.fmean(cell["loss"] for cell in found.values())
        numbers = f"{loss:.4f}", f"{mean:+.2f}%", f"{max(gaps):+.2f}%"
        table.add_row(model, format, way, str(len(gaps)), *numbers, verdict)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute what is missing, store it and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--part", nargs="+", choices=("errors", "losses"), default=["errors", "losses"])
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--formats", nargs="+", choices=list(FORMATS), help="(default: all; of losses some)")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--steps", type=int, default=1000, help="of training (default: %(default)s)")
    add("--warm-up", type=int, default=100, help="before errors (default: %(default)s)")
    add("--fresh", action="store_true", help="compute what was computed before again")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    console = Console()
    options.out.mkdir(parents=True, exist_ok=True)
    store = Store(options.out / f"block_scales-jax{jax.__version__}.json")
    cells = Cells(store, options.fresh, console)
    if "errors" in options.part:
        settings = {"steps": options.warm_up}
        for model, format, way in itertools.product(
            options.models, options.formats or FORMATS, options.ways
        ):
            if "select" in FORMATS[format] or way == "axis" and format not in OF_AXES:
                continue
            key = f"errors/{model}/{format}/{way}"
            cells.add(
                {key: functools.partial(errors, model, format, way, options.warm_up)}, settings
            )
    if "losses" in options.part:
        settings = {"steps": options.steps}
        for model in options.models:
            known = OF_LOSSES | (OF_GPT if model == "gpt4" else {})
            kinds = [("float32", "plain")]
            for format in options.formats or known:
                ways = (OF_LOSSES | OF_GPT).get(format, WAYS[:2])
                kinds += [(format, way) for way in ways if way in options.ways]
            # Seeds last: they share what was compiled.
            for (format, way), seed in itertools.product(kinds, options.seeds):
                key = f"losses/{model}/{format}/{way}/{seed}"
                task = functools.partial(train, model, format, way, seed, options.steps)
                cells.add({key: task}, settings)
    found = cells.run()
    wide = console if console.is_terminal else Console(width=150)
    for model in options.models if "errors" in options.part else ():
        wide.print(table_of_errors(found, model))
    if "losses" in options.part:
        wide.print(table_of_losses(found))


if __name__ == "__main__":
    main()
