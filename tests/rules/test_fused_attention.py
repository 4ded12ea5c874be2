"""The law of cuDNN's attention, by stand-ins of its primitives that run anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jax_scalify as jsa
from jax_scalify.numerics.targets import missing_plugin, parse_target

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")

INSTALL = missing_plugin(parse_target("h100"))


def attend(query, key, value, bias):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key).astype(jnp.float32)
    weights = jax.nn.softmax(scores + bias.astype(jnp.float32))
    return jnp.einsum("bnts,bsnh->btnh", weights.astype(value.dtype), value)


def stand_in(name, fun):
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(fun)
    primitive.def_abstract_eval(
        lambda *avals: jax.tree.map(jax.typeof, jax.eval_shape(fun, *avals))
    )
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=True))
    return primitive


def forward(query, key, value, bias, *_):
    return [attend(query, key, value, bias), jnp.zeros(query.shape[:3], jnp.float32)]


def backward(*args):
    query, key, value, bias, *_, statistics, result, cotangent = args
    # As the kernel does, of the result that it is given: rows of the cotangent times it.
    scores = jnp.einsum("btnh,bsnh->bnts", query, key).astype(jnp.float32)
    weights = jax.nn.softmax(scores + bias.astype(jnp.float32))
    wide = [x.astype(jnp.float32) for x in (value, result, cotangent)]
    of_weights = jnp.einsum("btnh,bsnh->bnts", wide[2], wide[0])
    rows = jnp.einsum("btnh,btnh->bnt", wide[2], wide[1])[..., None]
    of_scores = weights * (of_weights - rows)
    gradients = [
        jnp.einsum("bnts,bsnh->btnh", of_scores, key.astype(jnp.float32)),
        jnp.einsum("bnts,btnh->bsnh", of_scores, query.astype(jnp.float32)),
        jnp.einsum("bnts,btnh->bsnh", weights, wide[2]),
        jnp.sum(of_scores, axis=0, keepdims=True),
    ]
    return [g.astype(x.dtype) for g, x in zip(gradients, (query, key, value, bias), strict=True)]


FORWARD = stand_in("dot_product_attention_fwd_wrapper", forward)
BACKWARD = stand_in("dot_product_attention_bwd_wrapper", backward)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("static", [True, False])
def test_scales_go_around_the_kernel(static):
    rng = np.random.default_rng(0)
    shapes = [(2, 4, 2, 8)] * 3 + [(1, 2, 4, 4)]
    query, key, value, bias, ct = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in (*shapes, shapes[0])
    )
    small = 2.0**-30  # far below float16: values and cotangents keep it as a scale
    args = query, key, value * small, bias, ct * small
    others = [jnp.zeros(0)] * 6

    def passes(query, key, value, bias, ct):
        given = query, key, value, bias, *(x.astype(query.dtype) for x in others)
        out, statistics = FORWARD.bind(*given)
        return out, *BACKWARD.bind(*given, statistics, out, ct)

    scaled = [jsa.as_scaled_array(x, scale="rms", dtype=jnp.float16) for x in args]
    scaled = jsa.freeze_scales(scaled) if static else scaled
    got = jax.jit(jsa.scalify(passes))(*scaled)
    out, pull = jax.vjp(attend, *args[:4])
    for a, b in zip(got, (out, *pull(args[4])), strict=True):
        assert a.dtype == jnp.float16
        a, b = np.float64(jsa.asarray(a, jnp.float32)), np.float64(b)
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2 * np.abs(b).max())


@pytest.mark.skipif(INSTALL is not None, reason=f"needs a compiler: {INSTALL}")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cudnn_is_chosen(dtype):
    """Its kernels stay, next to FP8 matmuls, inside `scalify` too."""
    x, w = (jax.ShapeDtypeStruct(s, dtype) for s in ((2, 256, 4, 64), (64, 64)))

    def loss(w, x):
        y = jax.nn.dot_product_attention(x @ w, x, x, is_causal=True, implementation="cudnn")
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    step = jsa.scalify(jax.grad(jsa.fp8_matmuls(loss, jsa.fp8.everything)))
    args = jsa.ScaledArray(w, 1.0), jsa.ScaledArray(x, 1.0)
    report = jsa.numerics.compile_report(step, *args, target="h100")
    assert report.text.count("__cudnn$fmhaSoftmax") >= 2
    assert {row.has_fp8_operands for row in report.matmuls.rows} == {True}
