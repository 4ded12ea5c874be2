"""A ViT and a residual convolutional net: what the modules and functions suffice for."""

import math

import flax.nnx
import jax
import jax.numpy as jnp
import optax
import pytest

from jax_scalify import unit_scaling as us
from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling import nnx, optim
from tests.unit_scaling.test_umup_modules import rms

CLASSES, WIDTH, DEPTH, SIZE = 10, 32, 1, 8
TAU = us.umup_residuals()


def pooled(x):
    """The sum over positions, of unit scale if they are independent; its edge is a cut-edge."""
    return F.einsum("bpd->bd", x.reshape(len(x), -1, x.shape[-1]), constraint=None)


class ViT(flax.nnx.Module):
    """Patches by a convolution, learned positions, layers that see both ways, a mean, a readout."""

    def __init__(self, patch, rngs):
        def table(*shape):  # from axes that stay as they are to the width: input weights
            array = jax.random.normal(rngs.params(), shape)
            return flax.nnx.Param(array, role=us.Role("embedding", WIDTH))

        self.patches = table(patch, patch, 3, WIDTH)
        self.positions = table((SIZE // patch) ** 2, WIDTH)
        options = dict(is_causal=False, rope=False, qk_norm=True, depth=DEPTH, rngs=rngs)
        taus = [(TAU(i, 2 * DEPTH), TAU(i + 1, 2 * DEPTH)) for i in range(0, 2 * DEPTH, 2)]
        self.layers = flax.nnx.List(
            nnx.TransformerLayer(WIDTH, 2, 48, taus=pair, **options) for pair in taus
        )
        self.norm = nnx.RMSNorm(WIDTH)
        self.readout = nnx.LinearReadout(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images):
        patch = self.patches[...]
        x = F.conv(images, patch, strides=patch.shape[0], padding="VALID")
        x = x.reshape(len(x), -1, WIDTH)
        streams = [F.add(x, self.positions[...], None)]
        for layer in self.layers:
            streams.append(layer(streams[-1]))
        return self.readout(self.norm(pooled(streams[-1]))), streams


def vit():
    graph, params = flax.nnx.split(ViT(2, flax.nnx.Rngs(0)))
    return params, us.get_roles(params), lambda p, images: flax.nnx.merge(graph, p)(images)


def convnet():
    shapes = {"stem": (3, 3, 3, WIDTH), "readout": (WIDTH, CLASSES)}
    shapes |= {f"{name}_{i}": (3, 3, WIDTH, WIDTH) for i in range(DEPTH) for name in ("in", "out")}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items())}
    hidden = us.Role("weight", depth=DEPTH)
    roles = {"stem": us.Role("embedding", WIDTH), "readout": "output"}
    roles = us.get_roles(params, lambda path: roles.get(path, hidden))
    assert roles["in_0"].fan_in == 9 * WIDTH

    def apply(params, images):
        streams = [F.conv(images, params["stem"])]
        for i in range(DEPTH):

            def branch(x, i=i):
                x = F.gelu(F.conv(F.layer_norm(x), params[f"in_{i}"]))
                return F.conv(x, params[f"out_{i}"])

            streams.append(F.residual_apply(branch, streams[-1], TAU(i, DEPTH)))
        return F.linear_readout(F.rms_norm(pooled(streams[-1])), params["readout"], None), streams

    return params, roles, apply


@pytest.mark.sampled(16)
@pytest.mark.parametrize("make", [vit, convnet])
def test_models_of_vision_have_unit_scale_and_learn(make):
    params, roles, apply = make()
    templates = jax.random.normal(jax.random.key(1), (CLASSES, SIZE, SIZE, 3))
    labels = jnp.arange(20) % CLASSES
    images = 0.8 * templates[labels] + 0.6 * jax.random.normal(
        jax.random.key(2), (20, SIZE, SIZE, 3)
    )
    tx = optim.adam(2.0**-1, roles=roles)

    def loss(params):
        logits, streams = apply(params, images)
        return F.cross_entropy(logits, labels), (logits, streams)

    @jax.jit
    def step(params, state):
        (value, (logits, streams)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        sizes = jax.tree.map(lambda x: jnp.sqrt(jnp.mean(x**2)), (logits, streams, grads))
        return optax.apply_updates(params, updates), state, value, sizes

    values, state, (logits, streams, grads) = [], tx.init(params), (None, None, None)
    for _ in range(10):
        params, state, value, sizes = step(params, state)
        values.append(float(value))
        if logits is None:
            logits, streams, grads = jax.tree.map(float, sizes)
    assert values[0] == pytest.approx(math.log(CLASSES), abs=0.2)
    assert values[-1] < 0.5 * values[0], values
    assert logits == pytest.approx(1 / math.sqrt(WIDTH), rel=0.35)
    assert all(0.7 < size < 1.5 for size in streams), streams
    for path, size in jax.tree.leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # Averages of images are alike at first: their gradients of all labels cancel in part.
        # Queries and keys share the factor of values: a nearly uniform softmax leaves them little.
        low = 0.03 if "query" in name or "key" in name else 0.15
        assert low < size < 2.5, (name, size)
    assert rms(images) == pytest.approx(1, rel=0.05)
