"""Models that know nothing of unit scaling, as `(loss, params, *data)`, from three libraries."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


class _Residual(nn.Module):
    features: int
    strides: int

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=False)
        conv = functools.partial(nn.Conv, self.features, use_bias=False)
        h = nn.relu(norm()(conv((3, 3), self.strides)(x)))
        h = norm()(conv((3, 3))(h))
        if x.shape != h.shape:
            x = norm()(conv((1, 1), self.strides)(x))
        return nn.relu(x + h)


class _ResNet(nn.Module):
    stages: tuple

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.stages[0][0], (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        for features, strides in self.stages:
            x = _Residual(features, strides)(x)
        return nn.Dense(10)(x.mean((1, 2)))


def resnet(depth):
    """A ResNet of linen, its batch norms in training."""
    stages = ((16, 1), (32, 2), (32, 1), (16, 1), (64, 2), (64, 1))[:depth]
    model = _ResNet(stages)
    x = _normal(8, 16, 16, 3)
    variables = jax.jit(model.init)(jax.random.key(0), x)

    def loss(params, x, labels):
        state = {**variables, "params": params}
        return _cross_entropy(model.apply(state, x, mutable=["batch_stats"])[0], labels)

    return loss, variables["params"], x, jnp.arange(8)


class _MixerBlock(eqx.Module):
    patch_mixer: eqx.nn.MLP
    channel_mixer: eqx.nn.MLP
    norms: list

    def __init__(self, patches, channels, key):
        keys = jax.random.split(key)
        mlp = functools.partial(eqx.nn.MLP, width_size=64, depth=1, activation=jax.nn.gelu)
        self.patch_mixer = mlp(patches, patches, key=keys[0])
        self.channel_mixer = mlp(channels, channels, key=keys[1])
        self.norms = [eqx.nn.LayerNorm((channels, patches)), eqx.nn.LayerNorm((patches, channels))]

    def __call__(self, y):
        y = (y + jax.vmap(self.patch_mixer)(self.norms[0](y))).T
        return (y + jax.vmap(self.channel_mixer)(self.norms[1](y))).T


class _Mixer(eqx.Module):
    conv: eqx.nn.Conv2d
    blocks: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, depth, key, patches=16, channels=32):
        keys = jax.random.split(key, depth + 2)
        self.conv = eqx.nn.Conv2d(3, channels, 4, stride=4, key=keys[0])
        self.blocks = [_MixerBlock(patches, channels, k) for k in keys[2:]]
        self.norm = eqx.nn.LayerNorm((channels, patches))
        self.head = eqx.nn.Linear(channels, 10, key=keys[1])

    def __call__(self, x):
        y = self.conv(x)
        y = y.reshape(len(y), -1)
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y).mean(1))


def mixer(depth):
    """The MLP-mixer of Equinox's examples."""
    params, static = eqx.partition(_Mixer(depth, jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, x, labels):
        return _cross_entropy(jax.vmap(eqx.combine(params, static))(x), labels)

    return loss, params, _normal(8, 3, 16, 16), jnp.arange(8)


def gpt2(depth):
    """The GPT-2 of Hugging Face's transformers, whose last versions with Flax are 4.x."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModule

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=depth, n_head=4, **rates)
    model = FlaxGPT2LMHeadModule(config)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 128, (8, 17)))
    rest = jnp.ones((8, 16), int), jnp.broadcast_to(jnp.arange(16), (8, 16))
    init = functools.partial(model.init, return_dict=False)
    params = jax.jit(init)(jax.random.key(0), ids[:, :-1], *rest)["params"]

    def loss(params, ids):
        logits = model.apply({"params": params}, ids[:, :-1], *rest, return_dict=False)[0]
        return _cross_entropy(logits, ids[:, 1:])

    return loss, params, ids


def _cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
