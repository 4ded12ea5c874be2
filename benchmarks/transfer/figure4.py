"""Small character models, regular and unit-scaled, in float32 and float16.

After Blake et al., *Unit Scaling* (2023), figure 4: {attention, convolution, RNN} × {pre, post, no
norm} × {fixed, running-mean residual weights}. Both schemes compute the same network, with the same
residual weights: what differs is where factors are, in the weights' variance and the loss's mean,
or in each operation. float16 is what one gets by casting a model's weights: activations, gradients,
the weights themselves and both moments of Adam, which computes in float32 what it stores in
float16: the square of a gradient of 256 is infinite otherwise, whatever its share of the moment.
Adam does not see a constant factor of gradients, so the loss scale is not taken out again; its ε is
2^-20, as 1e-8 is 0 in float16, and its β₂ 0.99, as float16 would round the steps of 0.999 away.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import box
from rich.table import Table

import jax_scalify as jsa
from examples.gpt import data
from jax_scalify import unit_scaling as us
from jax_scalify.unit_scaling import functional as F

VOCABULARY, WIDTH, HEADS, KERNEL = 256, 64, 4, 5
BRANCHES = 4  # two layers, of a mixing branch and an MLP
BATCH, CONTEXT = 64, 64  # the more tokens, the smaller the gradients of a mean
HELD_OUT_BATCHES = 4
FIXED_TAU = 0.2  # share of a branch in the variance
MIXERS = ("attention", "convolution", "RNN")
NORMS = ("pre", "post", "no")
RESIDUALS = ("fixed", "running mean")
RATES = {"regular": (-9, -8, -7), "unit": (-6, -5, -4)}  # exponents of 2
LOSS_SCALE = 2048.0
OTHER_SEEDS = (1, 2)  # of the unit-scaled runs: one without norms is up to 1.7% off by chance
EPS, B2 = 2.0**-20, 0.99
RUNS = {  # scheme, dtype, loss scale
    "regular float32": ("regular", jnp.float32, 1.0),
    "regular float16": ("regular", jnp.float16, 1.0),
    "regular float16, loss scale 2048": ("regular", jnp.float16, LOSS_SCALE),
    "unit-scaled float32": ("unit", jnp.float32, 1.0),
    "unit-scaled float16": ("unit", jnp.float16, 1.0),
}
LIMIT = 0.5  # how far unit-scaled float16 may be from float32, in %
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Network:
    """One network under one scheme.

    Attributes:
        mixer, norm, residual: its kind.
        is_unit: whether it is unit-scaled.
    """

    mixer: str
    norm: str
    residual: str
    is_unit: bool

    def init(self, key: jax.Array) -> PyTree:
        """Return weights of float32: of unit scale, or of the variance 1/fan_in."""
        shapes = {"embedding": (VOCABULARY, WIDTH), "readout": (WIDTH, VOCABULARY)}
        for branch in range(0, BRANCHES, 2):
            shapes |= {f"{branch}/{name}": shape for name, shape in _MIXER_SHAPES[self.mixer]}
            shapes |= {f"{branch + 1}/up": (WIDTH, 4 * WIDTH)}
            shapes |= {f"{branch + 1}/down": (4 * WIDTH, WIDTH)}
        keys = jax.random.split(key, len(shapes))
        weights = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items())}
        if self.is_unit:
            return weights
        return {
            name: w if name == "embedding" else w / math.sqrt(math.prod(w.shape[:-1]))
            for name, w in weights.items()
        }

    def loss(self, weights: PyTree, tokens: jax.Array) -> jax.Array:
        """Return the mean cross entropy of tokens `(batch, context + 1)`."""
        x = jnp.take(weights["embedding"], tokens[:, :-1], axis=0)
        if self.is_unit:
            x = F.embedding(tokens[:, :-1], weights["embedding"])
        for branch in range(BRANCHES):
            parts = {n.split("/")[1]: w for n, w in weights.items() if n[:2] == f"{branch}/"}
            body = functools.partial(self._mlp if branch % 2 else self._mix, parts)
            x = self._residual(body, x, branch)
        logits = self._linear(F.layer_norm(x), weights["readout"])
        labels = tokens[:, 1:]
        if self.is_unit:
            return F.cross_entropy(logits, labels)
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def _residual(self, body: Callable, x: jax.Array, branch: int) -> jax.Array:
        inner = body if self.norm != "pre" else lambda x: body(F.layer_norm(x))
        if self.residual == "fixed":
            tau = us.fixed_tau(FIXED_TAU)(branch, BRANCHES)
        else:
            tau = us.running_mean()(branch, BRANCHES)
        if self.is_unit:
            x = F.residual_apply(inner, x, tau)
        else:
            x = (tau * inner(x) + x) * (1 / math.hypot(tau, 1))
        return F.layer_norm(x) if self.norm == "post" else x

    def _linear(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return F.linear(x, w) if self.is_unit else x @ w

    def _mlp(self, w: PyTree, x: jax.Array) -> jax.Array:
        h = self._linear(x, w["up"])
        h = F.relu(h) if self.is_unit else jax.nn.relu(h)
        return self._linear(h, w["down"])

    def _mix(self, w: PyTree, x: jax.Array) -> jax.Array:
        if self.mixer == "attention":
            heads = (*x.shape[:-1], HEADS, WIDTH // HEADS)
            q, k, v = (self._linear(x, w[name]).reshape(heads) for name in ("q", "k", "v"))
            q, k = F.rope(q), F.rope(k)
            if self.is_unit:
                mult = math.sqrt(q.shape[-1])
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, mult=mult)
            else:
                out = jsa.nn.dot_product_attention(q, k, v, is_causal=True)
            return self._linear(out.reshape(x.shape), w["out"])
        if self.mixer == "convolution":
            past = [(KERNEL - 1, 0)]
            if self.is_unit:
                return F.tanh(F.conv(x, w["kernel"], padding=past))
            numbers = ("NWC", "WIO", "NWC")
            out = jax.lax.conv_general_dilated(
                x, w["kernel"], (1,), past, dimension_numbers=numbers
            )
            return jnp.tanh(out)
        return self._recur(w, x)

    def _recur(self, w: PyTree, x: jax.Array) -> jax.Array:
        """A plain recurrence: `h = tanh((W x + U h) / √2)`."""
        inputs = jnp.swapaxes(self._linear(x, w["inputs"]), 0, 1)

        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            if self.is_unit:
                h = F.tanh(F.add(x, F.linear(h, w["recurrent"])))
            else:
                h = jnp.tanh((x + h @ w["recurrent"]) * math.sqrt(0.5))
            return h, h

        _, out = jax.lax.scan(step, jnp.zeros_like(inputs[0]), inputs)
        return jnp.swapaxes(out, 0, 1)


_MIXER_SHAPES = {
    "attention": [(name, (WIDTH, WIDTH)) for name in ("q", "k", "v", "out")],
    "convolution": [("kernel", (KERNEL, WIDTH, WIDTH))],
    "RNN": [("inputs", (WIDTH, WIDTH)), ("recurrent", (WIDTH, WIDTH))],
}


@functools.cache
def _corpus() -> data.Corpus:
    return data.load_corpus(None, context=CONTEXT)


class Trainer:
    """The compiled step of one run of `RUNS` for one network."""

    def __init__(self, network: Network, dtype: Any, loss_scale: float):
        self.optimizer = optax.scale_by_adam(b2=B2, eps=EPS)

        def init(seed: int) -> PyTree:
            return jax.tree.map(lambda w: w.astype(dtype), network.init(jax.random.key(seed)))

        def update(weights: PyTree, state: Any, tokens: jax.Array, rate: jax.Array) -> Any:
            grads = jax.grad(lambda w: loss_scale * network.loss(w, tokens))(weights)
            wide = jsa.tree.astype((weights, state, grads), jnp.float32)
            updates, new_state = self.optimizer.update(wide[2], wide[1])
            new = jax.tree.map(lambda w, u: w - rate * u, wide[0], updates), new_state
            return jax.tree.map(lambda a, b: a.astype(b.dtype), new, (weights, state))

        self._init = init
        weights = jax.eval_shape(init, 0)
        state = jax.eval_shape(self.optimizer.init, weights)
        tokens = jax.ShapeDtypeStruct((BATCH, CONTEXT + 1), jnp.int32)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        self._update = jax.jit(update).lower(weights, state, tokens, rate).compile()
        self._loss = jax.jit(network.loss).lower(weights, tokens).compile()

    def train(self, exponent: int, steps: int, seed: int = 0) -> float:
        """Train with warmup and cosine decay; return the held-out bits a character."""
        schedule = optax.warmup_cosine_decay_schedule(0.0, 2.0**exponent, steps // 10, steps)
        weights = self._init(seed)
        state = self.optimizer.init(weights)
        for step in range(steps):
            tokens = data.train_batch(_corpus(), seed=seed, step=step, batch=BATCH, context=CONTEXT)
            rate = jnp.float32(schedule(step + 1))
            weights, state = self._update(weights, state, jnp.asarray(tokens), rate)
        batches = data.held_out_batches(
            _corpus(), batches=HELD_OUT_BATCHES, batch=BATCH, context=CONTEXT
        )
        losses = [float(self._loss(weights, jnp.asarray(b))) for b in batches]
        return float(np.mean(losses)) / math.log(2)


def run_cell(mixer: str, norm: str, residual: str, run: str, rates: Sequence[int], steps: int):
    """Train at all given learning rates; return the bits of each."""
    scheme, dtype, loss_scale = RUNS[run]
    network = Network(mixer, norm, residual, scheme == "unit")
    trainer = Trainer(network, dtype, loss_scale)
    return {"bits": {str(e): trainer.train(e, steps) for e in rates}}


def run_seeds(mixer: str, norm: str, residual: str, run: str, exponent: int, steps: int):
    """Train from all other seeds; return the bits of each."""
    scheme, dtype, loss_scale = RUNS[run]
    network = Network(mixer, norm, residual, scheme == "unit")
    trainer = Trainer(network, dtype, loss_scale)
    return {"bits": {str(seed): trainer.train(exponent, steps, seed) for seed in OTHER_SEEDS}}


def networks() -> list[tuple[str, str, str]]:
    """All kinds of networks."""
    return list(itertools.product(MIXERS, NORMS, RESIDUALS))


def key_of(kind: tuple[str, str, str], run: str) -> str:
    """Return the key of a cell."""
    return f"figure4/{'/'.join(kind)}/{run}"


def reference_tasks(steps: int) -> dict[str, Callable[[], dict]]:
    """The runs in float32, at all learning rates."""
    return {
        key_of(kind, run): functools.partial(run_cell, *kind, run, RATES[scheme], steps)
        for kind in networks()
        for run, (scheme, dtype, _) in RUNS.items()
        if dtype == jnp.float32
    }


def float16_tasks(references: dict[str, dict], steps: int) -> dict[str, Callable[[], dict]]:
    """The runs in float16, at the learning rate that was best in float32."""
    return {
        key_of(kind, run): functools.partial(
            run_cell, *kind, run, [best_of(references, kind, scheme)[0]], steps
        )
        for kind in networks()
        for run, (scheme, dtype, _) in RUNS.items()
        if dtype != jnp.float32
    }


def seed_tasks(references: dict[str, dict], steps: int) -> dict[str, Callable[[], dict]]:
    """The unit-scaled runs from other seeds, at the learning rate that was best in float32."""
    return {
        f"{key_of(kind, run)}/seeds": functools.partial(
            run_seeds, *kind, run, best_of(references, kind, scheme)[0], steps
        )
        for kind in networks()
        for run, (scheme, _, _) in RUNS.items()
        if scheme == "unit"
    }


def best_of(cells: dict[str, dict], kind: tuple[str, str, str], scheme: str) -> tuple[int, float]:
    """Return the best learning rate of a scheme in float32, and its bits."""
    run = next(r for r, (s, dtype, _) in RUNS.items() if s == scheme and dtype == jnp.float32)
    bits = {int(e): b for e, b in cells[key_of(kind, run)]["bits"].items() if math.isfinite(b)}
    exponent = min(bits, key=bits.__getitem__)
    return exponent, bits[exponent]


def make_table(cells: dict[str, dict]) -> Table:
    """Bits a character of all runs, and how far float16 is from float32."""
    table = Table(box=box.SIMPLE, title="bits a character; float16 against float32 of its scheme")
    unit = [run for run, (scheme, _, _) in RUNS.items() if scheme == "unit"]
    for column in ("network", *RUNS, "mean of all seeds", ""):
        table.add_column(column, justify="right")
    for kind in networks():
        row, means = [], []
        for run, (scheme, dtype, _) in RUNS.items():
            reference = best_of(cells, kind, scheme)[1]
            bits = reference
            if dtype == jnp.float32:
                row.append(f"{reference:.3f}")
            else:
                (bits,) = cells[key_of(kind, run)]["bits"].values()
                row.append(f"{bits:.3f} ({100 * (bits / reference - 1):+.1f}%)")
            if run in unit:
                others = cells[f"{key_of(kind, run)}/seeds"]["bits"].values()
                means.append(np.mean([bits, *others]))
        gap = 100 * (means[1] / means[0] - 1)
        row.append(f"{gap:+.2f}%")
        table.add_row(" ".join(kind), *row, "pass" if abs(gap) <= LIMIT else "FAIL")
    return table
