"""`as_scaled_array` with rules of paths and leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import keystr

import jax_scalify as jsa

E4M3 = jnp.float8_e4m3fn
PARAMS = {
    "experts": {"kernel": jnp.stack([jnp.full((3, 4), v) for v in (0.1, 30.0)])},
    "attention": {"kernel": jnp.full((3, 3), 0.02), "bias": jnp.zeros(3)},
    "norm": np.ones(3, np.float32),
    "count": jnp.int32(3),
    "step": 7,
    "none": None,
    "name": "relu",
}


def dtype_rule(path, leaf):
    name = keystr(path)
    if "kernel" in name:
        return E4M3
    return "float32" if "norm" in name else None


def test_each_leaf_has_what_its_rule_says():
    out = jsa.as_scaled_array(
        PARAMS,
        scale=lambda path, leaf: "max" if "attention" in keystr(path) else "rms",
        dtype=dtype_rule,
        axis=lambda path, leaf: 0 if "experts" in keystr(path) else None,
    )
    experts, attention = out["experts"]["kernel"], out["attention"]["kernel"]
    assert experts.dtype == attention.dtype == E4M3 and out["norm"].dtype == jnp.float32
    np.testing.assert_array_equal(experts.scale, np.reshape([2.0**-4, 2.0**4], (2, 1, 1)))
    assert attention.scale == 2.0**-6 and jnp.shape(attention.scale) == ()
    assert out["attention"]["bias"] is PARAMS["attention"]["bias"]  # None: as it is
    for name in ("count", "step", "none", "name"):
        assert out[name] is PARAMS[name]


def test_rules_say_what_arguments_do():
    for name, value in (("dtype", jnp.bfloat16), ("scale", 4.0), ("scale", "max"), ("axis", (0,))):
        leaves = PARAMS["experts"], PARAMS["norm"]
        ruled, same = (
            jsa.as_scaled_array(leaves, **{"scale": "rms", name: given})
            for given in (lambda path, leaf, value=value: value, value)
        )
        assert jax.tree.structure(ruled) == jax.tree.structure(same)
        for a, b in zip(jax.tree.leaves(ruled), jax.tree.leaves(same), strict=True):
            np.testing.assert_array_equal(a, b)
    assert jsa.as_scaled_array(PARAMS["norm"], dtype=np.dtype("float16")).dtype == jnp.float16


def test_paths_and_leaves_are_those_of_jax():
    seen = {}

    def rule(path, leaf):
        seen[keystr(path)] = leaf
        return leaf.dtype

    jsa.as_scaled_array((PARAMS, jsa.scaled_array(jnp.ones(2), 4.0)), dtype=rule)
    assert seen["[0]['norm']"] is PARAMS["norm"] and seen["[1]"].scale == 4.0
    assert "[0]['count']" not in seen
    out = jsa.as_scaled_array(jsa.as_scaled_array(jnp.ones(2), 4.0), dtype=lambda *_: E4M3)
    assert out.dtype == E4M3 and out.scale == 4.0
    jitted = jax.jit(lambda p: jsa.as_scaled_array(p, scale="rms", dtype=lambda *_: jnp.float16))
    assert jitted(PARAMS["experts"])["kernel"].dtype == jnp.float16
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model = jsa.as_scaled_array(model, dtype=lambda p, v: E4M3 if "kernel" in keystr(p) else None)
    assert model.kernel.get_value().dtype == E4M3
    assert jsa.as_scaled_array({}, dtype=dtype_rule) == {}


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        (dict(dtype=lambda p, v: None), ValueError, "`dtype` matches no leaf.*all 4 of them.*norm"),
        (dict(axis=lambda p, v: None), ValueError, "`axis` matches no leaf"),
        (
            dict(dtype=lambda p, v: jnp.int8),
            TypeError,
            r"for `tree\['attention'\]\['bias'\]`, float32\[3\]: `dtype` must be floating.*int8",
        ),
        (dict(dtype=lambda p, v: "fp8"), TypeError, "must be floating point, as .*'fp8'"),
        (dict(axis=lambda p, v: 1), ValueError, "among the 1 axes of the leaf, got 1"),
        (dict(axis=lambda p, v: "rows"), TypeError, "`axis` must be an int"),
        (dict(scale=lambda p, v: "amax"), ValueError, r"\['bias'\]`.*\"rms\" or \"max\""),
        (dict(scale=lambda p, v: -1.0), ValueError, "finite and not negative"),
        (dict(scale=lambda p, v: [1.0, "a"]), (TypeError, ValueError), "tree"),
        (dict(block=("mxfp8", "a")), TypeError, r"pair of it and an axis, got \('mxfp8', 'a'\)"),
    ],
)
def test_refusals(rules, error, message):
    with pytest.raises(error, match=message):
        jsa.as_scaled_array(PARAMS, **rules)


@pytest.mark.parametrize("dtype", ["float8_e4m3", jnp.float8_e4m3])
def test_the_e4m3_that_no_accelerator_has_is_refused(dtype):
    x = jnp.ones(3)
    for convert in (
        lambda: jsa.as_scaled_array(x, scale="rms", dtype=dtype),
        lambda: jsa.as_scaled_array(x, scale="rms", dtype=lambda path, leaf: dtype),
        lambda: jsa.scaled_array(x, 2.0, dtype=dtype),
    ):
        with pytest.raises(TypeError, match="must not be float8_e4m3.*`jnp.float8_e4m3fn`"):
            convert()
