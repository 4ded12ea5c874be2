"""Attention whose products are FP8: by `forward_dtype`, and by `fp8_matmuls` of everything."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.base.jaxprs import all_equations

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")

E4M3 = jnp.float8_e4m3fn
CASES = {
    "plain": (4, 4, {}),
    "causal": (4, 4, dict(is_causal=True)),
    "grouped": (4, 2, dict(is_causal=True)),
    "masked": (4, 1, dict(mask=jnp.arange(8) < 5)),
}


def make(heads, groups, time=8, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(2, time, n, 8) for n in (heads, groups, groups)]
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


def both(attend, args):
    def loss(*args):
        return jnp.sum(jnp.sin(attend(*args).astype(jnp.float32)))

    return attend(*args), *jax.grad(loss, argnums=(0, 1, 2))(*args)


def kinds(fun, *args):
    found = all_equations(jax.make_jaxpr(fun)(*args).jaxpr)
    dots = (e for e in found if e.primitive.name == "dot_general")
    return collections.Counter(tuple(v.aval.dtype.name for v in e.invars) for e in dots)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CASES)
def test_next_to_wide_attention(name):
    heads, groups, options = CASES[name]
    args = make(heads, groups)

    def attend(*args, **formats):
        return jsa.nn.dot_product_attention(*args, **options, **formats)

    def fp8(*args):
        return attend(*args, forward_dtype=E4M3)

    want = both(attend, args)
    count = kinds(lambda *args: both(fp8, args), *args)
    assert not any("float32" in kind for kind in count) and sum(count.values()) == 2 + 6
    exact = dict(forward_dtype=jnp.float32, backward_dtype=jnp.float32)
    for a, b in zip(both(lambda *args: attend(*args, **exact), args), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for dtype in {"grouped": ["bfloat16"], "causal": ["float16"]}.get(name, []):
        given = [jsa.as_scaled_array(x, scale="rms", dtype=dtype) for x in args]
        for scaled in [given, jsa.freeze_scales(given)][: 2 if name == "causal" else 1]:
            got = jax.jit(jsa.scalify(lambda *args: both(fp8, args)))(*scaled)
            for a, b in zip(got, want, strict=True):
                assert a.dtype == dtype
                a = np.asarray(jsa.asarray(a, jnp.float32))
                np.testing.assert_allclose(a, b, atol=0.15 * float(jnp.abs(b).max()))


def test_weights_of_many_sources_do_not_vanish():
    """1 / 4096 is no number of E4M3; 2**8 of it is."""
    time = 4096
    query, key = jnp.ones((1, 1, 1, 8)), jnp.ones((1, time, 1, 8))
    value = jnp.asarray(np.random.default_rng(0).normal(size=(1, time, 1, 4)) + 1, jnp.float32)
    plain = jsa.nn.dot_product_attention(query, key, value)
    fp8 = jsa.nn.dot_product_attention(query, key, value, forward_dtype=E4M3)
    np.testing.assert_allclose(fp8, plain, rtol=0.05)
    inside = jsa.scalify(lambda *x: jsa.nn.dot_product_attention(*x, forward_dtype=E4M3))
    got = inside(*(jsa.as_scaled_array(x, dtype=jnp.float16) for x in (query, key, value)))
    np.testing.assert_allclose(jsa.asarray(got, jnp.float32), plain, rtol=0.05)


def test_everything_of_an_unmodified_function():
    args = make(4, 4)

    def attend(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    fp8 = jsa.fp8_matmuls(attend, jsa.fp8.everything)
    assert not any("float32" in kind for kind in kinds(lambda *x: both(fp8, x), *args))
    want = both(attend, args)
    given = [jsa.as_scaled_array(x, scale="rms", dtype=jnp.float16) for x in args]
    got = jax.jit(jsa.scalify(lambda *args: both(fp8, args)))(*given)
    for a, b in zip(got, want, strict=True):
        a = np.asarray(jsa.asarray(a, jnp.float32))
        np.testing.assert_allclose(a, b, atol=0.15 * float(jnp.abs(b).max()))


MASKED = "window", "everything"
SEGMENTS = jnp.array([[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 2, 2, 2]])
MASKS = {
    "window": dict(is_causal=True, local_window_size=(3, 0)),
    "both sides": dict(local_window_size=2),
    "lengths": dict(
        query_seq_lengths=jnp.array([8, 5]), key_value_seq_lengths=jnp.array([6, 8]), is_causal=True
    ),
    "packed": dict(is_causal=True, mask=(SEGMENTS[:, :, None] == SEGMENTS[:, None])[:, None]),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.full] * ((name, kind) != MASKED))
        for name in MASKS
        for kind in ("forward_dtype", "everything")
    ],
)
def test_masks_of_all_kinds_with_grouped_queries(name, kind):
    """As `jax.nn.dot_product_attention`; in FP8 an error of a few times that of bfloat16."""
    options, args = MASKS[name], make(4, 2)

    def theirs(*args):
        return jax.nn.dot_product_attention(*args, **options, implementation="xla")

    def ours(*args, **formats):
        return jsa.nn.dot_product_attention(*args, **options, **formats)

    want, own = (jax.jit(lambda *x, f=f: both(f, x))(*args) for f in (theirs, ours))
    for a, b in zip(own, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    narrow = [x.astype(jnp.bfloat16) for x in args]
    wide = [np.asarray(x, np.float32) for x in jax.jit(lambda *x: both(theirs, x))(*narrow)]
    given = [jsa.as_scaled_array(x, scale="rms", dtype=jnp.float16) for x in args]
    in_fp8 = {
        "forward_dtype": lambda *args: ours(*args, forward_dtype=E4M3),
        "everything": jsa.fp8_matmuls(theirs, jsa.fp8.everything),
    }
    got = jax.jit(jsa.scalify(lambda *x: both(in_fp8[kind], x)))(*given)
    for a, b, c in zip(got, want, wide, strict=True):
        error = np.linalg.norm(np.asarray(jsa.asarray(a, jnp.float32)) - b)
        assert error < 0.1 * np.linalg.norm(b) and error < 24 * np.linalg.norm(c - b)


def test_bad_masks_are_refused():
    query, key, value = make(2, 2)
    with pytest.raises(ValueError, match="`local_window_size` must not be negative, got -1"):
        jsa.nn.dot_product_attention(query, key, value, local_window_size=-1)
    with pytest.raises(ValueError, match=r"one for each example, \(2,\), got \(3,\)"):
        jsa.nn.dot_product_attention(query, key, value, query_seq_lengths=jnp.ones(3, int))
    with pytest.raises(TypeError, match="`key_value_seq_lengths` must be integers, got float32"):
        jsa.nn.dot_product_attention(query, key, value, key_value_seq_lengths=jnp.ones(2))


def test_bad_formats_are_refused():
    query, key, value = make(2, 2)
    with pytest.raises(TypeError, match="`forward_dtype` must be floating point, got int8"):
        jsa.nn.dot_product_attention(query, key, value, forward_dtype=jnp.int8)
