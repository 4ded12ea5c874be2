"""FP8 matmuls in models that know nothing of them: ours, Flax's and Qwix's, in one run.

    python -m benchmarks.accuracy.fp8  # 3 models, all variants, 3 seeds
    python -m benchmarks.accuracy.fp8 --models linen --seeds 0 --steps 100

Three transformers on bytes: a GPT of Flax linen (`scale_models`), that of `examples/gpt` with
Flax NNX's own layers, and one of linen with experts as grouped matmuls (`experts`). Every variant
has the same weights, batches and optimizer, and FP8 in all linear layers; the loss is that of
held-out text. `ours` is
`scalify(grad(fp8_matmuls(loss)))` with float32 state, `ours-nn` has the layers of `jsa.nn` besides,
`ours-float16` stores everything in float16. `gradient` is how far a variant's gradient is from
float32's, relative to it, at weights that float32 has trained. Every finished cell (model, variant,
seed) is kept in `benchmarks/results/fp8-jax<version>.json`: a run that was stopped goes on with the
next one. On a CPU FP8 is emulated: the losses are right, the step times are not those of a GPU.
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.linen import fp8_ops
from rich import box
from rich.console import Console
from rich.table import Table

import jax_scalify as jsa
import jax_scalify.nn.nnx
from benchmarks.accuracy.experts import BALANCE, ExpertLanguageModel
from benchmarks.accuracy.scale_models import (
    CONTEXT,
    PLAIN,
    TEXT_BATCH,
    LanguageModel,
    next_byte_batch,
)
from benchmarks.accuracy.scale_quality import SCALED
from benchmarks.paths import RESULTS, ROOT
from examples.gpt.config import get_size
from examples.gpt.report import ProgressLine
from examples.gpt.step import astype, keep_moments, make_optimizer
from examples.gpt.train import write_text

MODELS = ("linen", "nnx", "moe")
VARIANTS = ("float32", "bfloat16", "ours", "ours-nn", "ours-float16", "flax", "qwix")
CONFIG = get_size("tiny")
MOMENT_EXPONENTS = (-2, 2)
HELD_OUT_BATCHES = 32
WARM_UP = 16  # steps that Flax's scales need to settle
FORMATS = {
    "weight_qtype": jnp.float8_e4m3fn,
    "act_qtype": jnp.float8_e4m3fn,
    "bwd_qtype": jnp.float8_e5m2,
}
# What the other two do: not the example's head, which is its embedding.
SELECT = jsa.fp8.all_of(jsa.fp8.linear_layers, jsa.fp8.skip_embedding)
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Trial:
    """One variant of one model.

    Attributes:
        init: `init(seed) -> state`.
        update: the jitted `update(state, batch) -> state`.
        evaluate: the jitted `evaluate(state, batch) -> loss`.
    """

    init: Callable[[int], PyTree]
    update: Any
    evaluate: Callable[[PyTree, PyTree], jax.Array]


class Unavailable(Exception):
    """A variant that a library does not offer."""


# The two models: their initial variables and their loss


def linen_model(variant: str) -> tuple[Callable[[int], PyTree], Callable[[PyTree, PyTree], Any]]:
    """A GPT of Flax linen."""
    layers = SCALED if variant == "ours-nn" else PLAIN
    if variant == "flax":
        dense = functools.partial(linen.Dense, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
        layers = dataclasses.replace(PLAIN, Dense=dense)
    module: Any = LanguageModel(layers, compute_dtype(variant), depth=CONFIG.layers)
    if variant == "qwix":
        module = import_qwix().quantize_model(module, qwix_provider())

    def init(seed: int) -> PyTree:
        inputs = next_byte_batch(seed, 0)["inputs"]
        # The weights do not depend on the variant; Flax's FP8 has state besides.
        plain = LanguageModel(PLAIN, jnp.float32, depth=CONFIG.layers)
        variables = {"params": jax.jit(plain.init)(jax.random.key(seed), inputs)["params"]}
        if variant == "flax":
            variables = dict(jax.jit(module.init)(jax.random.key(seed), inputs)) | variables
        return variables

    def loss(variables: PyTree, batch: PyTree) -> jax.Array:
        logits = module.apply(variables, batch["inputs"])
        return cross_entropy(logits, batch["labels"], variant)

    return init, loss


def nnx_model(variant: str) -> tuple[Callable[[int], PyTree], Callable[[PyTree, PyTree], Any]]:
    """The GPT of the example; but for `ours-nn`, with Flax's own layers."""
    if variant == "flax":
        raise Unavailable("Flax's Fp8DirectDotGeneralOp is a module of linen")
    gpt = example_gpt(jax_scalify.nn.nnx if variant == "ours-nn" else nnx).GPT

    def make(seed: int) -> Any:
        return gpt(CONFIG, dtype=compute_dtype(variant), rngs=nnx.Rngs(seed))

    if variant == "qwix":
        tokens = next_byte_batch(0, 0)["inputs"]
        model = import_qwix().quantize_model(make(0), qwix_provider(), tokens)
    else:
        model = nnx.eval_shape(lambda: make(0))
    graph, _, rest = nnx.split(model, nnx.Param, ...)

    def init(seed: int) -> PyTree:
        return {"params": nnx.to_pure_dict(nnx.state(make(seed), nnx.Param))}

    def loss(variables: PyTree, batch: PyTree) -> jax.Array:
        logits = nnx.merge(graph, variables["params"], rest)(batch["inputs"])
        return cross_entropy(logits, batch["labels"], variant)

    return init, loss


def moe_model(variant: str) -> tuple[Callable[[int], PyTree], Callable[[PyTree, PyTree], Any]]:
    """A GPT of Flax linen with experts, whose loss has that of its routers in it."""
    if variant in ("flax", "qwix", "ours-nn"):
        raise Unavailable(f"{variant} has no grouped matmuls in FP8, or no layers with them")
    module: Any = ExpertLanguageModel(PLAIN, compute_dtype(variant), depth=CONFIG.layers)

    def init(seed: int) -> PyTree:
        plain = ExpertLanguageModel(PLAIN, jnp.float32, depth=CONFIG.layers)
        inputs = next_byte_batch(seed, 0)["inputs"]
        return {"params": jax.jit(plain.init)(jax.random.key(seed), inputs)["params"]}

    def loss(variables: PyTree, batch: PyTree) -> jax.Array:
        logits, balance = module.apply(variables, batch["inputs"])
        return cross_entropy(logits, batch["labels"], variant) + BALANCE * balance

    return init, loss


@functools.cache
def example_gpt(layers: ModuleType) -> ModuleType:
    """The module `examples/gpt/model.py` with its one import of layers changed."""
    path = ROOT / "examples" / "gpt" / "model.py"
    spec = importlib.util.spec_from_file_location(f"gpt_of_{layers.__name__}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with mock.patch.object(jax_scalify.nn, "nnx", layers):
        spec.loader.exec_module(module)
    return module


def compute_dtype(variant: str) -> Any:
    """The dtype of the activations."""
    return {"bfloat16": jnp.bfloat16, "ours-float16": jnp.float16}.get(variant, jnp.float32)


def cross_entropy(logits: jax.Array, labels: jax.Array, variant: str) -> jax.Array:
    """The mean loss, in float32 but for `ours-float16`."""
    if variant != "ours-float16":
        logits = logits.astype(jnp.float32)
    module = jsa.nn if variant == "ours-nn" else optax
    return module.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def import_qwix() -> Any:
    """Qwix, which is not among the project's dependencies."""
    try:
        import qwix
    except ImportError as error:
        raise Unavailable("pip install qwix") from error
    return qwix


def qwix_provider(**options: Any) -> Any:
    """FP8 in all linear layers: the models' attention is made of einsums or has batch dims."""
    qwix = import_qwix()
    path, names = r".*(?<!attention)", ("dot_general",)
    rule = qwix.QtRule(module_path=path, op_names=names, **FORMATS, **options)
    return qwix.QtProvider([rule])


# Training


def make_loss(model: str, variant: str) -> tuple[Callable, Callable]:
    """Return `init(seed) -> variables` and `loss(variables, batch)` of a variant."""
    make = {"linen": linen_model, "nnx": nnx_model, "moe": moe_model}[model]
    init, loss = make(variant)
    return init, jsa.fp8_matmuls(loss, SELECT) if variant.startswith("ours") else loss


def make_trial(model: str, variant: str, steps: int) -> Trial:
    """Build a variant."""
    init, loss = make_loss(model, variant)
    ours, float16 = variant.startswith("ours"), variant == "ours-float16"
    optimizer = make_optimizer(dataclasses.replace(CONFIG, steps=steps))

    def update(state: PyTree, batch: PyTree) -> PyTree:
        variables, opt_state = state
        grads = jax.grad(loss)(variables, batch)
        rest = {name: tree for name, tree in grads.items() if name != "params"}
        grads, params, opt_state = astype(
            (grads["params"], variables["params"], opt_state), jnp.float32
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        if float16:
            opt_state = keep_moments(opt_state, grads, MOMENT_EXPONENTS)
            params, opt_state = astype((params, opt_state), jnp.float16)
        # What is no parameter is Flax's FP8 state: its gradient is its next value.
        return {"params": params, **rest}, opt_state

    def first_state(seed: int) -> PyTree:
        variables = init(seed)
        state = variables, optimizer.init(variables["params"])
        if ours:
            state = jsa.as_scaled_array(state, scale="rms")
        return astype(state, jnp.float16) if float16 else state

    transform = jsa.scalify if ours else lambda fun: fun
    evaluate = jax.jit(transform(lambda state, batch: loss(state[0], batch)))
    return Trial(first_state, jax.jit(transform(update), donate_argnums=0), evaluate)


def train(trial: Trial, seed: int, steps: int, progress: Callable) -> float:
    """Train one cell and return its held-out loss."""
    state, start = trial.init(seed), time.monotonic()
    for step in range(steps):
        state = trial.update(state, next_byte_batch(seed, step))
        if (step + 1) % 50 == 0:
            loss = float(trial.evaluate(state, next_byte_batch(seed, step)))
            tokens = (step + 1) * TEXT_BATCH * CONTEXT
            progress(step + 1, loss, tokens / (time.monotonic() - start))
    held_out = (next_byte_batch(0, i, held_out=True) for i in range(HELD_OUT_BATCHES))
    return statistics.fmean(float(trial.evaluate(state, batch)) for batch in held_out)


def gradient_errors(model: str, variants: Sequence[str], steps: int) -> dict[str, float]:
    """How far each variant's gradient is from float32's, relative, after float32 training."""
    trial = make_trial(model, "float32", steps)
    state = trial.init(0)
    for step in range(steps):
        state = trial.update(state, next_byte_batch(0, step))
    params, batch = state[0]["params"], next_byte_batch(0, steps)
    gradients = {}
    for variant in variants:
        init, loss = make_loss(model, variant)
        gradient, variables = jax.grad(loss), init(0) | {"params": params}
        if variant.startswith("ours"):
            variables = jsa.as_scaled_array(variables, scale="rms")
            variables = astype(variables, compute_dtype(variant))
            gradient = jsa.scalify(gradient)
        gradient = jax.jit(gradient)
        for _ in range(WARM_UP if variant == "flax" else 0):
            variables = gradient(variables, batch) | {"params": params}
        leaves = jax.tree.leaves(jsa.asarray(gradient(variables, batch)["params"], jnp.float32))
        gradients[variant] = np.concatenate([np.ravel(x).astype(np.float64) for x in leaves])
    exact = gradients["float32"]
    norm = np.linalg.norm(exact)
    return {name: float(np.linalg.norm(g - exact) / norm) for name, g in gradients.items()}


def measure_costs(model: str, variants: Sequence[str], repeats: int) -> dict[str, dict[str, float]]:
    """Compile time, size of the program and step time of some variants, their steps in turn."""
    # Made anew: what has run before is not compiled again.
    trials = {variant: make_trial(model, variant, 100) for variant in variants}
    costs, running = {}, {}
    batch = next_byte_batch(0, 0)
    for name, trial in trials.items():
        state = trial.init(0)
        start = time.perf_counter()
        compiled = trial.update.lower(state, batch).compile()
        seconds = time.perf_counter() - start
        instructions = len(re.findall(r"^\s+(?:ROOT )?%?\S+ = ", compiled.as_text(), re.M))
        costs[name] = {"first_call_s": seconds, "hlo": instructions}
        running[name] = compiled, compiled(state, batch)
    times: dict[str, list[float]] = {name: [] for name in trials}
    for number in range(repeats):
        for name in list(trials) if number % 2 else reversed(trials):
            compiled, state = running[name]
            start = time.perf_counter()
            running[name] = compiled, jax.block_until_ready(compiled(state, batch))
            times[name].append(1e3 * (time.perf_counter() - start))
    return {
        name: cost | {"step_ms": statistics.median(times[name])} for name, cost in costs.items()
    }


# Results


def summarise(results: dict, models: Sequence[str], seeds: Sequence[int]) -> Table:
    """Compare each variant with float32, seed by seed."""
    table = Table(box=box.SIMPLE, title=f"JAX {jax.__version__}, Flax {flax.__version__}")
    for column in ("model", "variant"):
        table.add_column(column)
    for column in ("loss", "gap", "worst seed", "gradient", "first call", "HLO", "step"):
        table.add_column(column, justify="right")
    for model, variant in itertools.product(models, VARIANTS):
        cells = results["cells"]
        found = [cells.get(f"{model}/{variant}/{seed}", {}).get("loss") for seed in seeds]
        plain = [cells.get(f"{model}/float32/{seed}", {}).get("loss") for seed in seeds]
        if None in found or None in plain:
            continue
        gaps = [100 * (a / b - 1) for a, b in zip(found, plain, strict=True)]
        row = [f"{statistics.fmean(found):.4f}", f"{statistics.fmean(gaps):+.2f}%"]
        row.append(f"{max(gaps):+.2f}%")
        error = results["gradients"].get(f"{model}/{variant}")
        row.append("" if error is None else f"{100 * error:.1f}%")
        cost = results["costs"].get(f"{model}/{variant}")
        base = results["costs"].get(f"{model}/float32")
        if cost and base:
            ratios = {key: cost[key] / base[key] for key in cost}
            row.append(f"{cost['first_call_s']:.1f} s ({ratios['first_call_s']:.1f}x)")
            row.append(f"{cost['hlo']:,} ({ratios['hlo']:.1f}x)")
            row.append(f"{cost['step_ms']:.0f} ms ({ratios['step_ms']:.1f}x)")
        table.add_row(model, variant, *row)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, measure, store and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--steps", type=int, default=300, help="(default: %(default)s)")
    add("--repeats", type=int, default=20, help="steps that are timed (default: %(default)s)")
    add("--fresh", action="store_true", help="train what was trained before again")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in ("steps", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(options, name)}")

    console = Console(width=120)
    path = options.out / f"fp8-jax{jax.__version__}.json"
    results: dict[str, Any] = {"cells": {}, "costs": {}, "gradients": {}}
    if path.exists():
        results |= json.loads(path.read_text())

    def store() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(results, indent=1, sort_keys=True) + "\n")

    for model in options.models:
        trials = {}
        for variant in options.variants:
            try:
                trials[variant] = make_trial(model, variant, options.steps)
            except Unavailable as error:
                console.print(f"{model}/{variant}: not run: {error}")
        for seed, (variant, trial) in itertools.product(options.seeds, trials.items()):
            key = f"{model}/{variant}/{seed}"
            cell = results["cells"].get(key, {})
            if not options.fresh and cell.get("steps") == options.steps:
                continue
            with ProgressLine(key, options.steps, console) as progress:
                loss = train(trial, seed, options.steps, progress)
            results["cells"][key] = {"loss": loss, "steps": options.steps}
            store()
        missing = any(f"{model}/{name}" not in results["gradients"] for name in trials)
        if "float32" in trials and (missing or options.fresh):
            console.print(f"{model}: gradients")
            errors = gradient_errors(model, list(trials), options.steps)
            results["gradients"] |= {f"{model}/{name}": error for name, error in errors.items()}
            store()
        # Times are compared within one run.
        missing = any(f"{model}/{name}" not in results["costs"] for name in trials)
        if missing or options.fresh:
            console.print(f"{model}: compile and step times")
            costs = measure_costs(model, list(trials), options.repeats)
            results["costs"] |= {f"{model}/{name}": cost for name, cost in costs.items()}
            store()
    console.print(summarise(results, options.models, options.seeds))


if __name__ == "__main__":
    main()
