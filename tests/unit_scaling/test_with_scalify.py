"""A unit-scaled model needs no scales: what `scalify` adds to it."""

import flax.linen
import jax
import jax.numpy as jnp
import pytest

import jax_scalify as jsa
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.unit_scaling import linen

IDS = jax.random.randint(jax.random.key(1), (4, 16), 0, 32)
# By how many launches static scales may be more than none, of more than a hundred.
CASES = [
    (False, jnp.float32, 8),
    pytest.param(False, jnp.float16, 12, marks=pytest.mark.full),
    pytest.param(True, jnp.float32, 12, marks=pytest.mark.full),
    pytest.param(True, jnp.float16, 24, marks=pytest.mark.full),
]


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, jsa.ScaledArray))


@pytest.mark.full
@pytest.mark.optimized
@pytest.mark.newest
@pytest.mark.parametrize("fp8, dtype, more", CASES)
def test_scales_are_static_and_cost_next_to_nothing(fp8, dtype, more):
    module = linen.TransformerDecoder(32, 32, num_layers=1, num_heads=2, fp8=fp8)
    boxed = jax.jit(module.init)(jax.random.key(0), IDS)["params"]
    params = jax.tree.map(lambda p: p.astype(dtype), flax.linen.meta.unbox(boxed))

    def loss(params):
        return module.apply({"params": params}, IDS, (IDS + 1) % 32, method="loss")

    plain = jax.value_and_grad(loss)
    scaled = jsa.scalify(plain)
    static = jsa.freeze_scales(jsa.as_scaled_array(params, scale=1.0))

    without = jax.make_jaxpr(scaled)(params)
    assert not any(isinstance(x, jsa.ScaledArray) for x in leaves(jax.eval_shape(scaled, params)))
    expected = [e.primitive.name for e in all_equations(jax.make_jaxpr(plain)(params).jaxpr)]
    found = [e.primitive.name for e in all_equations(without.jaxpr)]
    assert found.count("dot_general") == expected.count("dot_general")

    results = leaves(jax.eval_shape(scaled, static))
    assert all(x.is_static and 0.5 <= x.scale <= 2 for x in results)

    reports = [
        jsa.numerics.compile_report(jax.jit(fun), args)
        for fun, args in ((plain, params), (scaled, params), (scaled, static))
    ]
    launches = [report.launches for report in reports]
    assert launches[1] == launches[0] and reports[1].bytes_moved == reports[0].bytes_moved
    assert launches[2] <= launches[0] + more
