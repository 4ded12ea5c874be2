"""Cases of `unit_scale` on several devices, which `tests/test_sharding.py` runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_scalify import unit_scaling as us
from tests.helpers import compiled

DEVICES = 8


def rms(x):
    return float(jnp.sqrt(jnp.mean(jnp.square(x))))


def normal(**shapes):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}


def mesh():
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,))


PARAMS = normal(up=(16, 64), down=(64, 16), head=(16, 8)) | {
    "bias": jnp.zeros(64),
    "gain": jnp.ones(16),
}
X, LABELS = normal(x=(64, 16))["x"], jnp.arange(64) % 8


def model(params, x, labels, total=lambda y: y):
    h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    h = jax.nn.gelu(h * params["gain"] @ params["up"] + params["bias"])
    x = x + total(h @ params["down"])
    logits = jax.nn.log_softmax(x @ params["head"])
    return -jnp.take_along_axis(logits, labels[:, None], 1).mean()


def data_parallel(params, x, labels):
    return jax.lax.pmean(model(params, x, labels), "d")


def tensor_parallel(params, x, labels):
    return model(params, x, labels, lambda y: jax.lax.psum(y, "d"))


SHARDED = {"up": P(None, "d"), "down": P("d"), "bias": P("d"), "gain": P(), "head": P()}


def compare(is_tensor, check_vma):
    """On several devices a model is what it is on one; gradients are, up to a constant."""
    fun = jax.shard_map(
        tensor_parallel if is_tensor else data_parallel,
        mesh=mesh(),
        in_specs=(SHARDED, P(), P()) if is_tensor else (P(), P("d"), P("d")),
        out_specs=P(),
        check_vma=check_vma,
    )
    value, grads = compiled(jax.value_and_grad(us.unit_scale(fun)), PARAMS, X, LABELS)
    expected, plain = compiled(jax.value_and_grad(us.unit_scale(model)), PARAMS, X, LABELS)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name, grad in grads.items():
        ratio = rms(grad) / rms(plain[name])
        assert 1 / 3 < ratio < 1.1, (name, ratio)
        np.testing.assert_allclose(grad, ratio * plain[name], atol=1e-4 * rms(grad))


def unit_scale_of_a_norm_over_devices():
    def norm(x, mean=lambda x: x):
        m = mean(x.mean(0))
        return jax.nn.relu((x - m) * jax.lax.rsqrt(mean((x * x).mean(0)) - m * m + 1e-6))

    def fun(params, x, mean=lambda x: x):
        return norm(x @ params["up"], mean) @ params["down"]

    sharded = jax.shard_map(
        lambda params, x: fun(params, x, lambda x: jax.lax.pmean(x, "d")),
        mesh=mesh(),
        in_specs=(P(), P("d")),
        out_specs=P("d"),
    )
    got = compiled(us.unit_scale(sharded), PARAMS, X)
    expected = compiled(us.unit_scale(fun), PARAMS, X)
    np.testing.assert_allclose(got, expected, rtol=0.02, atol=0.01)


CASES = {
    "unit_scale, tensor parallel": functools.partial(compare, True, True),
    "unit_scale, data parallel, unchecked types": functools.partial(compare, False, False),
    "unit_scale, a norm over devices": unit_scale_of_a_norm_over_devices,
}
