"""What does FP8 do to a gradient, at the same weights: in which pass, in which layer?

    python -m benchmarks.accuracy.gradient_errors --models vit gpt4 llama

It takes a hundred seeds to see a tenth of a percent of loss, and a few batches to see what makes
it. A model of `parity` is trained in float32; then the gradients of some batches are computed with
its weights in float16, in float32 and by each variant of `parity_steps`, and with FP8 in one kind
of layer alone. "Error" is the mean distance from float32's gradient, "of the mean" that of their
mean over all batches, which no averaging takes away, both as shares of float32's; "loss" is what is
added to the loss.
"""

import argparse
import functools
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import jax_scalify as jsa
from benchmarks.accuracy.parity import LEARNING_RATES, find_models
from benchmarks.accuracy.parity_steps import FP8_OPTIONS, make_step
from benchmarks.accuracy.scale_models import PLAIN, Model

PyTree = Any

VARIANTS = ("fp8-hidden", "fp8-forward", "fp8-backward", "fp8-gradients")
SEED = 7  # of the batches that are looked at


class Gradient(NamedTuple):
    """A loss and its gradient, all weights in one vector."""

    loss: float
    vector: np.ndarray


def train(model: Model, steps: int) -> tuple[PyTree, PyTree]:
    """Return weights and what is no weight, after some steps in float32 of a run of 1,000."""
    first_state, update = make_step(model, "float32", 1000, LEARNING_RATES[model.name])
    state, step = first_state(0), jax.jit(update)
    for i in range(steps):
        state, _ = step(state, model.batch(0, i))
    return state[:2]


def find_layers(model: Model, params: PyTree, other: PyTree) -> list[str]:
    """Return the scopes of what may be in FP8, with `*` for numbers."""
    found: dict[str, None] = {}

    def look(matmul: Any) -> bool:
        found[re.sub(r"\d+", "*", matmul.scope)] = None
        return False

    loss = functools.partial(model.loss, layers=PLAIN, dtype=jnp.float16)
    select = jsa.fp8.all_of(jsa.fp8.hidden_layers, look)
    jax.eval_shape(jsa.fp8_matmuls(loss, select), params, other, model.batch(SEED, 0))
    return list(found)


def only(layer: str) -> dict[str, Any]:
    """Return the options of FP8 in one kind of layer."""
    pattern = re.compile(re.escape(layer).replace(r"\*", r"\d+"))
    return {"select": jsa.fp8.all_of(jsa.fp8.hidden_layers, lambda m: pattern.fullmatch(m.scope))}


def measure(
    model: Model, params: PyTree, other: PyTree, batches: int
) -> Iterator[tuple[str, list[Gradient], list[Gradient]]]:
    """Yield of each variant its name, its gradients and those of float32."""
    weights = jsa.as_scaled_array(params, scale="rms", dtype=jnp.float16)
    others = jsa.as_scaled_array(other)
    data = [model.batch(SEED, i) for i in range(batches)]

    def loss_of(params: PyTree, other: PyTree, batch: dict, dtype: Any) -> jax.Array:
        return model.loss(params, other, batch, PLAIN, dtype)[0].astype(jnp.float32)

    def of(step: Callable, params: PyTree, other: PyTree) -> list[Gradient]:
        found = [jsa.asarray(step(params, other, batch), jnp.float32) for batch in data]
        return [
            Gradient(float(loss), np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)]))
            for loss, grads in found
        ]

    wide = functools.partial(loss_of, dtype=jnp.float32)
    narrow = functools.partial(loss_of, dtype=jnp.float16)
    rounded = jsa.asarray(weights, jnp.float32)
    reference = of(jax.jit(jax.value_and_grad(wide)), rounded, other)
    variants = {"float16": narrow}
    variants |= {name: jsa.fp8_matmuls(narrow, **FP8_OPTIONS[name]) for name in VARIANTS}
    layers = find_layers(model, params, other)
    variants |= {layer: jsa.fp8_matmuls(narrow, **only(layer)) for layer in layers}
    for name, loss in variants.items():
        step = jax.jit(jsa.scalify(jax.value_and_grad(loss)))
        yield name, of(step, weights, others), reference


def compare(found: list[Gradient], reference: list[Gradient]) -> tuple[float, float, float, float]:
    """Return the error of a gradient and of their mean, what the loss gains, and its error."""
    pairs = list(zip(found, reference, strict=True))
    errors = [np.float64(a.vector) - b.vector for a, b in pairs]
    size = statistics.fmean(float(np.linalg.norm(b.vector)) for b in reference)
    mean = np.mean([np.float64(b.vector) for b in reference], axis=0)
    gained = [a.loss - b.loss for a, b in pairs]
    scatter = statistics.stdev(gained) / len(gained) ** 0.5 if len(gained) > 1 else 0.0
    return (
        statistics.fmean(float(np.linalg.norm(e)) for e in errors) / size,
        float(np.linalg.norm(np.mean(errors, axis=0)) / np.linalg.norm(mean)),
        statistics.fmean(gained),
        scatter,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table of each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=list(LEARNING_RATES), default=["vit", "gpt4", "llama"])
    add("--steps", type=int, default=500, help="in float32, of 1,000 (default: %(default)s)")
    add("--batches", type=int, default=24, help="that are looked at (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in ("steps", "batches"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(options, name)}")
    console, known = Console(width=100), find_models()
    for name in options.models:
        console.print(f"{name}: {options.steps} steps in float32")
        params, other = train(known[name], options.steps)
        table = Table(box=box.SIMPLE, title=name)
        for column in ("in FP8", "error", "of the mean", "loss"):
            table.add_column(column, justify="left" if column == "in FP8" else "right")
        for variant, found, reference in measure(known[name], params, other, options.batches):
            error, of_mean, gained, scatter = compare(found, reference)
            row = f"{100 * error:.1f}%", f"{100 * of_mean:.1f}%", f"{gained:+.4f} ± {scatter:.4f}"
            table.add_row(variant, *row)
            console.print(f"  {variant}: {row[0]}")
        console.print(table)


if __name__ == "__main__":
    main()
