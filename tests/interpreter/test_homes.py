"""Leaves keep their static scales, also if a choice or a clip follows their update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa


def stored(w, u):
    return jsa.match_scales(w - u, w)


STEPS = {
    "skip": lambda w, u, ok: jnp.where(ok, stored(w, u), w),
    "cond": lambda w, u, ok: lax.cond(ok, lambda: stored(w, u), lambda: w),
    "optimizer": lambda w, u, ok: jnp.where(ok, jsa.optim.apply_updates(w, -u), w),
    "clip": lambda w, u, ok: jnp.clip(stored(w, u), -4, 4),
    "mask": lambda w, u, ok: jnp.where(w > 0, stored(w, u), 0),
}
WIDE_STEPS = {
    "skip-sum": lambda w, u, ok: jnp.where(ok, w - 0.5 * u, w),
    "clip-sum": lambda w, u, ok: jnp.clip(w - 0.5 * u, -4, 4),
    "mask-sum": lambda w, u, ok: jnp.where(w > 0, w - 0.5 * u, w),
    "threshold": lambda w, u, ok: w - jnp.clip(w, -0.125, 0.125) - 0.5 * u,
    "scatter": lambda w, u, ok: w.at[jnp.array([1, 0])].add(-u[:2]),
}
CASES = [(name, dtype) for name in STEPS for dtype in ("float16", "bfloat16", "float32")]
CASES += [(name, dtype) for name in WIDE_STEPS for dtype in ("bfloat16", "float32")]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_next_leaf_has_the_scale_of_the_leaf(name, dtype):
    step = (STEPS | WIDE_STEPS)[name]
    w = jsa.ScaledArray(jnp.ones((4, 4), dtype), 2.0**-6)
    for scale in (2.0**8, jnp.float32(2.0**8)):
        u = jsa.ScaledArray(jnp.full((4, 4), 2.0**-13, dtype), scale)
        got = jax.jit(jsa.scalify(step))(w, u, True)
        assert got.scale == 2.0**-6
        assert isinstance(got.scale, float)
        want = step(np.float32(2.0**-6) * jnp.ones((4, 4)), jnp.full((4, 4), 2.0**-5), True)
        np.testing.assert_allclose(jsa.asarray(got, jnp.float32), want, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_of_different_scales_are_added_to_a_leaf(dtype):
    """A loop gives each of its steps a scale. The leaf keeps the shape of its own."""

    def step(w, u, c):
        rows = lax.map(lambda x: x[0] * x[1], (u, c))
        return w.at[jnp.array([0, 1])].add(-0.125 * rows)

    w = jsa.ScaledArray(jnp.ones((4, 4), dtype), jnp.float32(2))
    u = jsa.ScaledArray(jnp.ones((2, 4), dtype), jnp.float32(4))
    got = jax.jit(jsa.scalify(step))(w, u, jnp.array([1, 3], dtype))
    assert got.scale.shape == ()
    np.testing.assert_array_equal(jsa.asarray(got, jnp.float32)[:, 0], [1.5, 0.5, 2, 2])


def test_another_array_in_a_choice_ends_a_home():
    w = jsa.ScaledArray(jnp.ones(4), 2.0**-6)
    other = jsa.ScaledArray(jnp.ones(4), jnp.float32(2.0**10))
    got = jax.jit(jsa.scalify(lambda w, x, m: jnp.where(m, w, x)))(w, other, jnp.arange(4) < 2)
    assert not isinstance(got.scale, float)
    np.testing.assert_array_equal(jsa.asarray(got), [2.0**-6, 2.0**-6, 1024, 1024])
