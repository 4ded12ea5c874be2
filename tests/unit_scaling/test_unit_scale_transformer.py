"""`unit_scale` on a Flax transformer that knows nothing of it."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_scalify import unit_scaling as us
from jax_scalify.interpreter.tracing import trace
from jax_scalify.unit_scaling.automatic import evaluation, planning, program
from tests.helpers import compiled

WIDTH, VOCABULARY, LENGTH, BATCH = 32, 64, 8, 8


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(h, mask=mask)
        h = nn.LayerNorm()(x)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(h)))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        mask = nn.make_causal_mask(tokens)
        positions = self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x = nn.Embed(VOCABULARY, WIDTH)(tokens) + positions
        for _ in range(2):
            x = Block()(x, mask)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def loss(params, tokens, labels):
    logits = Transformer().apply(params, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def initialised(tokens):
    """Parameters as Flax initialises them, without compiling that."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        name = path[-1].key
        if name in ("bias", "scale"):
            return jnp.full(leaf.shape, float(name == "scale"))
        std = 0.02 if name == "positions" else 1 / math.sqrt(leaf.shape[0])
        return jnp.asarray(rng.normal(size=leaf.shape) * std, jnp.float32)

    shapes = jax.eval_shape(Transformer().init, jax.random.key(0), tokens)
    return jax.tree.map_with_path(draw, shapes)


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def observed(fun, *args):
    """RMS of the result of every scaled operation, of its gradient, and of each parameter's."""
    traced = trace(fun, args, {})
    plan = planning.make_plan(program.flatten(traced.closed), "to_output_scale")

    def recorded(shifts, operands):
        kept = []

        def observe(group, x):
            if not jnp.issubdtype(x.dtype, jnp.inexact) or x.size <= 16:
                return x
            kept.append(x)
            return x + shifts[len(kept) - 1] if shifts else x

        (out,) = evaluation.run(plan, operands, observe)
        return out, kept

    _, kept = jax.eval_shape(recorded, None, traced.operands)
    shifts = [jnp.zeros(x.shape, x.dtype) for x in kept]
    params = jax.tree.leaves(args[0])
    rest = traced.operands[len(params) :]

    def gradients(shifts, params):
        def total(shifts, params):
            return recorded(shifts, [*params, *rest])

        return jax.grad(total, (0, 1), has_aux=True)(shifts, params)

    (cotangents, weights), values = compiled(gradients, shifts, params)
    return [[rms(x) for x in xs] for xs in (values, cotangents, weights)]


def test_every_tensor_has_unit_scale():
    tokens, labels = np.random.default_rng(1).integers(0, VOCABULARY, (2, BATCH, LENGTH))
    params = us.unit_parameters(initialised(tokens))
    forward, backward, weights = observed(loss, params, tokens, labels)
    keys = [x for x in weights if x < 1e-5]
    assert len(keys) == 2  # biases of keys: the softmax does not see them
    assert len(forward) > 40
    for name, found in dict(forward=forward, backward=backward, weights=weights).items():
        found = np.array([x for x in found if x not in keys])
        assert 0.25 < found.min() and found.max() < 4, (name, found.round(2))


def test_the_report_names_what_it_has_found():
    tokens = jnp.zeros((BATCH, LENGTH), int)
    params = initialised(tokens)
    found = us.unit_scale(loss).report(params, tokens, tokens).rows
    sums = [row for row in found if "sum" in row.kind]
    assert [row.kind for row in sums] == ["sum"] + ["residual sum"] * 4
    shares = [np.square(row.weights).max() for row in sums]
    np.testing.assert_allclose(shares, [1 / 2, 1 / 2, 2 / 3, 3 / 4, 4 / 5])
    assert all("weighted where it starts" in row.note for row in sums[1:])
    names = {name for row in found for name in row.operands if name.startswith("args")}
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    assert names == {f"args[0]{jax.tree_util.keystr(path)}" for path in paths}
