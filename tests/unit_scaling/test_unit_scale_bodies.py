"""`unit_scale` through branches, loops of unknown length and collectives;
`on_devices.py` has `shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify import unit_scaling as us
from tests.helpers import compiled


def rms(x):
    return float(jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))))


def normal(**shapes):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}


def rows(fun, *args, **options):
    return us.unit_scale(fun, **options).report(*args).rows


def test_both_branches_have_unit_scale():
    params = normal(deep=(16, 64), back=(64, 16), flat=(16, 16))
    x = normal(x=(32, 16))["x"]

    def fun(params, x, is_deep):
        def deep(x):
            return jnp.tanh(x @ params["deep"]) @ params["back"]

        return jax.lax.cond(is_deep, deep, lambda x: 3 * jnp.sin(x @ params["flat"]), x)

    scaled = us.unit_scale(fun)
    for is_deep in (True, False):
        assert 0.9 < rms(compiled(scaled, params, x, is_deep)) < 1.1
    operations = [row.operation for row in rows(fun, params, x, True)]
    assert operations[0] == "cond" and operations.count("dot_general") == 3


def test_a_loop_of_unknown_length_keeps_unit_scale():
    params = normal(w=(16, 16))
    x = normal(x=(32, 16))["x"]

    def fun(params, x, steps):
        def body(carry):
            i, h = carry
            return i + 1, h + jnp.tanh(h @ params["w"])

        return jax.lax.while_loop(lambda c: c[0] < steps, body, (0, x))[1]

    scaled = us.unit_scale(fun)
    for steps in (0, 1, 4):  # the same weights in all steps make their terms alike
        assert 0.8 < rms(compiled(scaled, params, x, steps)) < 2
    (residual,) = [row for row in rows(fun, params, x, 3) if row.kind == "residual sum"]
    np.testing.assert_allclose(np.square(residual.weights), 0.5)  # in each step, however many
    tangent = jax.jvp(lambda x: scaled(params, x, 3), (x,), (x,))[1]
    assert jnp.isfinite(tangent).all()


def test_a_condition_may_depend_on_what_is_scaled():
    def fun(x, limit):
        return jax.lax.while_loop(lambda h: jnp.sum(h) > limit, lambda h: jnp.tanh(h) - 0.5, x)

    out = us.unit_scale(fun)(jnp.ones((4, 4)), jnp.float32(-3.0))
    assert jnp.sum(out) <= -3 and out.shape == (4, 4)


def test_collectives_of_independent_terms():
    x = normal(x=(8, 16))["x"]
    operations = {
        "psum": lambda x: jax.lax.psum(x, "d"),
        "psum_scatter": lambda x: jax.lax.psum_scatter(x, "d", tiled=True),
        "all_gather": lambda x: jax.lax.all_gather(x, "d"),
        "ppermute": lambda x: jax.lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)]),
        "all_to_all": lambda x: jax.lax.all_to_all(x, "d", 0, 0, tiled=True),
    }

    def fun(x):
        return [f(x) for f in operations.values()]

    out = jax.vmap(us.unit_scale(fun, constraint=None), axis_name="d")(x)
    for name, result in zip(operations, out, strict=True):
        assert 0.6 < rms(result) < 1.6, name  # of few numbers
