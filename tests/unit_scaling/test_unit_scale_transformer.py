"""`unit_scale` on a Flax transformer that knows nothing of it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_scalify import unit_scaling as us
from jax_scalify.tracing import trace
from jax_scalify.unit_scaling.automatic import evaluation, planning, program

WIDTH, VOCABULARY, LENGTH, BATCH = 64, 128, 16, 8


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


@pytest.fixture(scope="module")
def setup():
    tokens, labels = jax.random.randint(jax.random.key(0), (2, BATCH, LENGTH), 0, VOCABULARY)
    params = jax.jit(Transformer().init)(jax.random.key(1), tokens)
    return params, tokens, labels


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

    @jax.jit
    def gradients(shifts, params):
        def total(shifts, params):
            return recorded(shifts, [*params, *rest])

        return jax.grad(total, (0, 1), has_aux=True)(shifts, params)

    (cotangents, weights), values = gradients(shifts, params)
    return [[rms(x) for x in xs] for xs in (values, cotangents, weights)]


def test_every_tensor_has_unit_scale(setup):
    params, tokens, labels = setup
    forward, backward, weights = observed(loss, us.unit_parameters(params), tokens, labels)
    print(np.round(forward, 2), np.round(backward, 2), np.round(weights, 2), sep="\n")
    assert len(forward) > 25
    keys = [rms for rms in weights if rms < 1e-5]
    assert len(keys) == 2  # biases of keys: the softmax does not see them
    for name, found in dict(forward=forward, backward=backward, weights=weights).items():
        found = [x for x in found if x not in keys]
        assert 0.25 < min(found) and max(found) < 4, (name, np.round(found, 2))
