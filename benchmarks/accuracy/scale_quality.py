"""How near to unit size `scalify` keeps the data of every activation and gradient.

    python -m benchmarks.accuracy.scale_quality  # all models, at init and trained
    python -m benchmarks.accuracy.scale_quality --models gpt4 llama --moments init

A tensor is looked at as it comes out of `scalify`: the RMS of its data and its scale, in octaves.
Activations are the outputs of every module call, by its path (`#2` for its second call),
activation gradients are the gradients of the same tensors, weight gradients those of the
parameters. Every finished cell (model, variant, moment) is kept in
`benchmarks/results/scale_quality-jax<version>.json`: a run that was stopped goes on with the next
one, and a cell is measured again if the models, the rules or its settings have changed.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, serialization
from rich import box
from rich.console import Console
from rich.table import Table

import jax_scalify as jsa
import jax_scalify.nn.linen as jsa_linen
from benchmarks.accuracy.scale_models import MODELS, PLAIN, Layers, Model
from benchmarks.paths import RESULTS, ROOT
from examples.gpt.report import clock
from examples.gpt.train import write_text
from jax_scalify.base import pow2
from jax_scalify.interpreter import facts

PyTree = Any

SEED = 0
LEARNING_RATE = 1e-3
MOMENTS = ("init", "trained")
KINDS = ("activations", "activation gradients", "weight gradients")
ALL_GRADIENTS = "all gradients"
NEAR, FAR = 3, 4  # octaves from unit size that the table counts
SOURCES = {
    "models": [
        ROOT / "benchmarks" / "accuracy" / "scale_models.py",
        ROOT / "examples" / "gpt" / "data.py",
    ],
    "rules": sorted((ROOT / "jax_scalify").rglob("*.py")),
}


# Variants


def with_rescaled_gradient(norm: Callable[..., linen.Module]) -> Callable:
    """Rescale the gradient of a norm's input by its L2 norm: the paper's remedy for drift."""

    def make(*args, **kwargs):
        module = norm(*args, **kwargs)
        return lambda x: module(jsa.ops.dynamic_rescale_l2_grad(x))

    return make


RESCALED = dataclasses.replace(
    PLAIN,
    **{
        name: with_rescaled_gradient(getattr(PLAIN, name))
        for name in ("LayerNorm", "RMSNorm", "BatchNorm")
    },
)
SCALED = Layers(
    Embed=jsa_linen.Embed,
    LayerNorm=jsa_linen.LayerNorm,
    RMSNorm=jsa_linen.RMSNorm,
    gelu=jsa.nn.gelu,
    silu=jsa.nn.silu,
    relu=jsa.nn.relu,
    dot_product_attention=jsa.nn.dot_product_attention,
    softmax_cross_entropy=jsa.nn.softmax_cross_entropy_with_integer_labels,
)
LAYERS = {"rules": PLAIN, "nn": SCALED, "rescale": RESCALED}
MAIN_VARIANTS = tuple(LAYERS)
# What `--variants` takes besides: one function of `jsa.nn` less, or one rule of the primitives.
LAYERS |= {
    f"nn-without-{field.name}": dataclasses.replace(SCALED, **{field.name: field.default})
    for field in dataclasses.fields(SCALED)
    if getattr(SCALED, field.name) is not field.default
}


def switched_off(target: Any, name: str, replacement: Callable) -> Callable:
    """A context in which a function of the library is another one."""

    @contextlib.contextmanager
    def context():
        with mock.patch.object(target, name, replacement):
            yield

    return context


SWITCHES = {
    # A constant that is promoted when it meets a scaled value is an array of scale 1.
    "rules-without-constants": (pow2, "split_constant", lambda value: (float(value), 0)),
    "rules-without-nonnegative": (facts, "is_nonnegative", lambda eqn, inputs: False),
    "rules-without-computed": (facts, "_is_computed", lambda eqn, inputs, traits: False),
    "rules-without-repeated": (facts, "_count_sums", lambda eqn, inputs, traits: 0),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run a model.

    Attributes:
        layers: its building blocks.
        context: entered around tracing; may change the rules.
    """

    layers: Layers
    context: Callable[[], AbstractContextManager] = contextlib.nullcontext


VARIANTS = {name: Variant(layers) for name, layers in LAYERS.items()}
VARIANTS |= {name: Variant(PLAIN, switched_off(*switch)) for name, switch in SWITCHES.items()}


# Measuring


@jax.custom_vjp
def tap(x: jax.Array, eps: jax.Array) -> jax.Array:
    """Return `x`; the gradient of `eps` is that of `x`, as if `eps`, a zero, had been added.

    An addition would do the same to the values, but the sum of a non-negative array and `eps` is
    not known to be non-negative: the scales would not be those of the model.
    """
    return x


tap.defvjp(lambda x, eps: (x, None), lambda _, cotangent: (cotangent, cotangent))


class Recorder:
    """Collect the outputs of all module calls, and add a perturbation to each.

    Args:
        params: what a module may hand out without computing it; not an activation.
        eps: the perturbations by name, or `None` for none.
    """

    def __init__(self, params: PyTree, eps: dict[str, jax.Array] | None):
        self.activations: dict[str, jax.Array] = {}
        self._eps = eps
        self._seen = {id(leaf): (leaf, leaf) for leaf in jax.tree.leaves(params)}
        self._calls: dict[str, int] = {}

    def __call__(self, next_fun, args, kwargs, context):
        """Intercept a method of a module."""
        out = next_fun(*args, **kwargs)
        if context.method_name != "__call__":
            return out
        path = "/".join(context.module.path) or "model"
        self._calls[path] = self._calls.get(path, 0) + 1
        if self._calls[path] > 1:
            path = f"{path}#{self._calls[path]}"
        leaves, structure = jax.tree.flatten(out)
        names = [path] if len(leaves) == 1 else [f"{path}.{i}" for i in range(len(leaves))]
        return structure.unflatten(map(self._record, names, leaves))

    def _record(self, name: str, x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        # A module often returns what its last child returned, or a tensor twice: one record.
        if id(x) not in self._seen:
            out = x if self._eps is None else tap(x, self._eps[name])
            self._seen |= {id(x): (x, out), id(out): (out, out)}
            self.activations[name] = out
        return self._seen[id(x)][1]


def recorded_loss(model: Model, layers: Layers, dtype: Any) -> Callable:
    """Return `loss(params, eps, other_state, batch) -> (loss, activations)`."""

    def loss_fn(params, eps, other_state, batch):
        recorder = Recorder(params, eps)
        with linen.intercept_methods(recorder):
            loss, _ = model.loss(params, other_state, batch, layers, dtype)
        return loss, recorder.activations

    return loss_fn


def measure(model: Model, variant: Variant, params: PyTree, other_state: PyTree, dtype: Any):
    """Run one step scaled, and one plain in float32.

    Returns:
        For each kind, the octaves `{name: [data, scale, plain]}` of the RMS of the data, the scale
        and the RMS of the plain tensor; and for each kind the number of tensors that are zero.
    """
    batch = model.batch(SEED, 0)

    def run(layers, dtype, transform):
        loss_fn = recorded_loss(model, layers, dtype)
        state = jsa.tree.astype((params, other_state), dtype)
        shapes = jax.eval_shape(loss_fn, state[0], None, state[1], batch)[1]
        eps = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        if transform is jsa.scalify:  # eps gets scale 0, "any scale"
            state = scaled_state((params, other_state), dtype)
            eps = jsa.as_scaled_array(eps)
        step = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)
        (_, activations), (gradients, perturbations) = jax.jit(transform(step))(
            state[0], eps, state[1], batch
        )
        return dict(zip(KINDS, map(named, (activations, perturbations, gradients))))

    plain = run(PLAIN, jnp.float32, lambda fun: fun)
    with variant.context(), jsa.ScalifyConfig(missing_rule="error"):
        scaled = run(variant.layers, dtype, jsa.scalify)

    octaves, zeros = {}, {}
    for kind in KINDS:
        rows = {
            name: [*data_and_scale(x), data_and_scale(plain[kind][name])[0]]
            for name, x in scaled[kind].items()
        }
        octaves[kind] = {name: row for name, row in rows.items() if row[0] != -math.inf}
        zeros[kind] = len(rows) - len(octaves[kind])
    return octaves, zeros


@functools.partial(jax.jit, static_argnums=1)
def scaled_state(state: PyTree, dtype: Any) -> PyTree:
    """Return the state scaled by its RMS, with data of a dtype."""
    return jsa.tree.astype(jsa.as_scaled_array(state, "rms"), dtype)


def named(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by their paths."""
    is_scaled = lambda x: isinstance(x, jsa.ScaledArray)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def data_and_scale(x: Any) -> tuple[float, float]:
    """Return log2 of the RMS of the data (inf if it is not finite) and log2 of the scale."""
    data, scale = (x.data, x.scale) if isinstance(x, jsa.ScaledArray) else (x, 1.0)
    rms = math.sqrt(np.square(np.asarray(data, np.float64)).mean())
    return (log2(rms) if math.isfinite(rms) else math.inf), log2(np.max(scale))


def log2(x: float) -> float:
    """Return the logarithm, of 0 as well."""
    return math.log2(x) if x else -math.inf


def trained_state(model: Model, steps: int, folder: Path, console: Console) -> tuple:
    """Return parameters and other state after plain float32 training, from a file if there is one.

    The file's name says what it depends on.
    """
    state = model.init(SEED)
    path = folder / f"{model.name}-{steps}-{digest('models')}-jax{jax.__version__}.msgpack"
    if path.exists():
        return serialization.from_bytes(state, path.read_bytes())
    optimizer = optax.adamw(LEARNING_RATE)
    opt_state = optimizer.init(state[0])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(state, opt_state, batch):
        loss = functools.partial(model.loss, layers=PLAIN, dtype=jnp.float32)
        (loss, other_state), gradients = jax.value_and_grad(loss, has_aux=True)(*state, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, state[0])
        return (optax.apply_updates(state[0], updates), other_state), opt_state, loss

    shown = started = time.perf_counter()
    for step in range(1, steps + 1):
        state, opt_state, loss = update(state, opt_state, model.batch(SEED, step))
        if step == 1:  # the time to compile says nothing about the time left
            jax.block_until_ready(loss)
            shown = started = time.perf_counter()
        now = time.perf_counter()
        if step == steps or now > shown + 5:
            left = clock((now - started) / step * (steps - step))
            console.print(f"  step {step:>5}/{steps}   loss {float(loss):.3f}   {left} left")
            shown = now
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(serialization.to_bytes(state))
    temporary.replace(path)
    return state


@functools.cache
def digest(sources: str) -> str:
    """Return a short hash of source files."""
    text = b"".join(path.read_bytes() for path in SOURCES[sources])
    return hashlib.sha256(text).hexdigest()[:12]


# Cells


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measurement."""

    model: str
    variant: str
    moment: str
    dtype: str
    steps: int

    @property
    def key(self) -> str:
        """Its name in the file of results."""
        return "/".join((self.model, self.variant, self.moment, self.dtype))

    @property
    def settings(self) -> dict:
        """What the result depends on: a stored result of other settings is not used."""
        steps = self.steps if self.moment == "trained" else 0
        return {"steps": steps, "models": digest("models"), "rules": digest("rules")}


def measure_cells(cells: Sequence[Cell], out: Path, fresh: bool, console: Console) -> dict:
    """Measure the cells that have no current result, store them, and return all that is stored."""
    path = out / f"scale_quality-jax{jax.__version__}.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    missing = [cell for cell in cells if fresh or not is_current(cell, stored)]
    console.print(f"{len(cells)} cells, {len(cells) - len(missing)} of them finished before")
    started = time.perf_counter()
    for number, cell in enumerate(missing):
        left = ""
        if number:
            seconds = (time.perf_counter() - started) / number * (len(missing) - number)
            left = f", about {clock(seconds)} left"
        console.print(f"cell {number + 1} of {len(missing)}: {cell.key}{left}")
        model = MODELS[cell.model]
        if cell.moment == "init":
            state = model.init(SEED)
        else:
            folder = out.parent / "runs" / "scale_quality"
            state = trained_state(model, cell.steps, folder, console)
        octaves, zeros = measure(model, VARIANTS[cell.variant], *state, jnp.dtype(cell.dtype))
        stored[cell.key] = {"settings": cell.settings, "octaves": octaves, "zeros": zeros}
        write_text(path, to_json(stored))
    return stored


def is_current(cell: Cell, stored: dict) -> bool:
    """Return whether a result of the cell is stored, and is of the same settings."""
    return stored.get(cell.key, {}).get("settings") == cell.settings


def to_json(stored: dict) -> str:
    """Return JSON with a line a tensor."""

    def short(row):
        return [round(x, 2) if math.isfinite(x) else x for x in row]

    def lines(node, depth):
        if not isinstance(node, dict):
            return json.dumps(short(node) if isinstance(node, list) else node)
        pad = " " * depth
        inner = (f"{pad} {json.dumps(k)}: {lines(v, depth + 1)}" for k, v in node.items())
        return "{\n" + ",\n".join(inner) + f"\n{pad}}}" if node else "{}"

    return lines(dict(sorted(stored.items())), 0) + "\n"


# Summary


def summarise(cell: Cell, results: dict) -> list[dict]:
    """Return a row for each kind of tensor, and one for the two kinds of gradients together.

    Keys of a row: the number of tensors and of those left out since they are zero; the shares
    within `NEAR` and `FAR` octaves of unit size; the octave farthest from it, and whose it is.
    For a trained model, if it was measured at init too: the octaves that the data moved since
    init, less those that the plain tensor moved, of the gradient where this is largest.
    """
    init = dataclasses.replace(cell, moment="init")
    first = results[init.key] if is_current(init, results) else None
    zeros = results[cell.key]["zeros"]
    zeros = zeros | {ALL_GRADIENTS: sum(zeros[kind] for kind in KINDS[1:])}
    rows = []
    for kind in (*KINDS, ALL_GRADIENTS):
        octaves = together(results[cell.key]["octaves"])[kind]
        sizes = {name: row[0] for name, row in octaves.items()}
        worst = farthest(sizes)
        row = {
            "cell": cell.key,
            "kind": kind,
            "count": len(sizes),
            "zero": zeros[kind],
            "near": share(sizes.values(), NEAR),
            "far": share(sizes.values(), FAR),
            "worst": sizes.get(worst, math.nan),
            "worst_name": worst,
        }
        if cell.moment == "trained" and first and "gradients" in kind:
            moved = relative_movement(together(first["octaves"])[kind], octaves)
            row["moved_name"] = farthest(moved)
            row["moved"] = moved.get(row["moved_name"], math.nan)
        rows.append(row)
    return rows


def together(octaves: dict[str, dict]) -> dict[str, dict]:
    """Add the gradients of activations and weights as a kind of their own."""
    activations, weights = (octaves[kind] for kind in KINDS[1:])
    activations = {f"at {name}": row for name, row in activations.items()}
    return octaves | {ALL_GRADIENTS: activations | weights}


def share(sizes: Iterable[float], octaves: float) -> float:
    """Return the share of sizes that are within so many octaves of 1."""
    inside = [abs(size) <= octaves for size in sizes]
    return sum(inside) / len(inside) if inside else math.nan


def farthest(sizes: dict[str, float]) -> str:
    """Return the name of the tensor that is farthest from unit size."""
    return max(sizes, key=lambda name: abs(sizes[name]), default="")


def relative_movement(before: dict[str, list], after: dict[str, list]) -> dict[str, float]:
    """Return by how much each tensor's data moved more than the plain tensor did, in octaves."""
    return {
        name: (after[name][0] - before[name][0]) - (after[name][2] - before[name][2])
        for name in after
        if name in before
    }


def make_table(cells: Sequence[Cell], results: dict) -> Table:
    """Return the summary as a table to print."""
    title = f"JAX {jax.__version__}: log2 RMS of the data"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("cell", "tensors"):
        table.add_column(name, no_wrap=True)
    for name in ("n", "zero", f"±{NEAR}", f"±{FAR}", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    trained = any(cell.moment == "trained" for cell in cells)
    if trained:
        table.add_column("moved", justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
    for cell in cells:
        for row in summarise(cell, results):
            moved = [f"{row['moved']:+.1f}", row["moved_name"]] if "moved" in row else ["", ""]
            table.add_row(
                row["cell"] if row["kind"] == KINDS[0] else "",
                row["kind"],
                str(row["count"]),
                str(row["zero"]),
                f"{row['near']:.1%}",
                f"{row['far']:.1%}",
                f"{row['worst']:+.1f}",
                row["worst_name"],
                *(moved if trained else ()),
            )
    return table


def make_worst_table(cells: Sequence[Cell], results: dict, count: int) -> Table:
    """Return the tensors of each cell that are farthest from unit size."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("cell", "tensors"):
        table.add_column(name, no_wrap=True)
    for name in ("data", "scale"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tensor", overflow="fold")
    for cell in cells:
        for kind in KINDS:
            rows = results[cell.key]["octaves"][kind]
            for name in sorted(rows, key=lambda name: -abs(rows[name][0]))[:count]:
                data, scale, _ = rows[name]
                table.add_row(cell.key, kind, f"{data:+.1f}", f"{scale:+.0f}", name)
    return table


# Okabe and Ito's colours, which colour-blind readers can tell apart, and a line style besides.
STYLES = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":")]
SHOWN = 16  # octaves either side; what is farther is drawn at the edge


def plot(path: Path, cells: Sequence[Cell], results: dict) -> None:
    """Draw a histogram for each model and kind, a line for each variant, at one moment."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    models = [name for name in MODELS if any(cell.model == name for cell in cells)]
    variants = [name for name in VARIANTS if any(cell.variant == name for cell in cells)]
    figure, axes = pyplot.subplots(
        len(models),
        len(KINDS),
        figsize=(11, 1 + 1.5 * len(models)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    bins = np.arange(-SHOWN - 0.5, SHOWN + 1)
    for line, column in np.ndindex(axes.shape):
        axis, kind = axes[line, column], KINDS[column]
        for octaves, style in ((NEAR, "-"), (8, ":")):
            for x in (-octaves, octaves):
                axis.axvline(x, color="#BBBBBB", linestyle=style, linewidth=1, zorder=0)
        for cell in (cell for cell in cells if cell.model == models[line]):
            number = variants.index(cell.variant)
            color, style = STYLES[number % len(STYLES)]
            sizes = [row[0] for row in results[cell.key]["octaves"][kind].values()]
            heights, _ = np.histogram(np.clip(sizes, -SHOWN, SHOWN), bins)
            heights = 100 * heights / max(len(sizes), 1)
            axis.stairs(heights, bins, color=color, alpha=0.2 if number == 0 else 0, fill=True)
            axis.stairs(
                heights, bins, color=color, linestyle=style, linewidth=1.4, label=cell.variant
            )
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(0)
        axis.set_xticks(range(-SHOWN, SHOWN + 1, 4))
        if line == 0:
            axis.set_title(kind)
        if column == 0:
            axis.set_ylabel(f"{models[line]}\n% of tensors")
        if line == len(models) - 1:
            axis.set_xlabel("log2 RMS(data)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False)
    title = f"{cells[0].moment}, {cells[0].dtype}; lines at ±{NEAR} and ±8, the rest at ±{SHOWN}"
    figure.suptitle(title, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# Command line


def names_among(known: Iterable[str], what: str) -> Callable[[str], list[str]]:
    """Return a parser of names between commas, which refuses those that are not known."""

    def parse(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        bad = [name for name in found if name not in known]
        if bad:
            raise argparse.ArgumentTypeError(
                f"unknown {what} {', '.join(bad)}: choose from {', '.join(known)}"
            )
        return found

    return parse


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables, store JSON and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument

    def add_names(option: str, known: Iterable[str], default: Sequence[str] = ()) -> None:
        what = option.removeprefix("--").removesuffix("s")
        text = f"of {', '.join(known)} (default: {', '.join(default) or 'all'})"
        default = [list(default or known)]
        add(option, type=names_among(known, what), nargs="+", default=default, help=text)

    add_names("--models", MODELS)
    add_names("--variants", VARIANTS, MAIN_VARIANTS)
    add_names("--moments", MOMENTS)
    add("--steps", type=int, default=1000, help="of training (default: %(default)s)")
    add("--dtype", choices=("float32", "float16"), default="float32", help="(default: %(default)s)")
    add("--fresh", action="store_true", help="measure what was measured before again")
    add("--worst", type=int, default=0, metavar="N", help="print the N worst tensors of each kind")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be positive, got {options.steps}")
    models, variants, moments = (
        functools.reduce(operator.add, lists)
        for lists in (options.models, options.variants, options.moments)
    )
    every = [
        Cell(model, variant, moment, options.dtype, options.steps)
        for moment, model, variant in itertools.product(MOMENTS, MODELS, VARIANTS)
    ]
    cells = [
        cell
        for cell in every
        if cell.model in models and cell.variant in variants and cell.moment in moments
    ]
    console = Console()
    if not console.is_terminal and console.width < 170:
        console = Console(width=170)
    results = measure_cells(cells, options.out, options.fresh, console)
    console.print(make_table(cells, results))
    if options.worst:
        console.print(make_worst_table(cells, results, options.worst))
    # The pictures show what was measured before, too, but for rules that were switched off.
    drawn = [cell for cell in every if cell.variant in MAIN_VARIANTS and is_current(cell, results)]
    for moment in MOMENTS:
        chosen = [cell for cell in drawn if cell.moment == moment]
        if moment in moments and chosen:
            parts = ["scale_quality"]
            parts += [moment] * (moment != "init") + [options.dtype] * (options.dtype != "float32")
            path = options.out / f"{'-'.join(parts)}.png"
            plot(path, chosen, results)
            console.print(f"drew {path}")


if __name__ == "__main__":
    main()
