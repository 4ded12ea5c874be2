"""`nn.dot_general`: both passes against float32 dots of rounded operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.base.jaxprs import all_equations

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

DIMENSIONS = {
    "plain": ((5, 8), (8, 3), (((1,), (0,)), ((), ()))),
    "transposed": ((8, 5), (3, 8), (((0,), (1,)), ((), ()))),
    "batch": ((2, 5, 8), (2, 8, 3), (((2,), (1,)), ((0,), (0,)))),
    "batch-last": ((5, 8, 2), (3, 2, 8), (((1,), (2,)), ((2,), (1,)))),
    "two-contracting": ((4, 5, 6), (6, 3, 4), (((0, 2), (2, 0)), ((), ()))),
    "permuted-contracting": ((4, 6, 5), (3, 6, 4), (((1, 0), (1, 2)), ((), ()))),
    "two-batch": ((2, 3, 5, 4), (3, 4, 2, 6), (((3,), (1,)), ((1, 0), (0, 2)))),
    "everything": ((2, 4, 5, 3, 2), (4, 3, 7, 2, 2), (((3, 1), (1, 0)), ((4, 0), (4, 3)))),
    "no-free": ((3, 8), (3, 8), (((1,), (1,)), ((0,), (0,)))),
    "outer": ((3,), (4,), (((), ()), ((), ()))),
}


def rounded(x, dtype):
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype).astype(jnp.float32)


def make(name):
    lhs_shape, rhs_shape, dims = DIMENSIONS[name]
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (lhs_shape, rhs_shape))
    out = jax.eval_shape(lambda a, b: lax.dot_general(a, b, dims), lhs, rhs)
    ct = jnp.asarray(rng.normal(size=out.shape), jnp.float32)
    return lhs, rhs, ct, dims


def reference(lhs, rhs, ct, dims, forward=E4M3, backward=E5M2):
    lhs, rhs = rounded(lhs, forward), rounded(rhs, forward)
    out, vjp = jax.vjp(lambda a, b: lax.dot_general(a, b, dims), lhs, rhs)
    return out, *vjp(rounded(ct, backward))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", DIMENSIONS)
def test_both_passes(name):
    lhs, rhs, ct, dims = make(name)

    def run(a, b, c):
        out, vjp = jax.vjp(lambda x, y: jsa.nn.dot_general(x, y, dims), a, b)
        return out, *vjp(c)

    expected = reference(lhs, rhs, ct, dims)
    for got, want in zip(run(lhs, rhs, ct), expected, strict=True):
        assert got.shape == want.shape and got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(32)
@pytest.mark.parametrize("formats", [("bfloat16",) * 2, ("float16", "bfloat16")], ids=" ".join)
@pytest.mark.parametrize("name", DIMENSIONS)
def test_formats_of_16_bits(name, formats):
    """Jitted: there XLA folds transposes, and has none for float32 products of bfloat16."""
    forward, backward = formats
    types = {"forward_dtype": forward, "backward_dtype": backward}
    lhs, rhs, ct, dims = make(name)

    def run(a, b, c):
        out, vjp = jax.vjp(lambda x, y: jsa.nn.dot_general(x, y, dims, **types), a, b)
        return out, *vjp(c)

    for got, want in zip(jax.jit(run)(lhs, rhs, ct), reference(lhs, rhs, ct, dims, *formats)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("backward", ["nvfp4", "mxfp8", E4M3, jnp.bfloat16, (E5M2, "mxfp4")])
@pytest.mark.parametrize("forward", ["nvfp4", "mxfp4", E4M3, jnp.bfloat16, ("mxfp8", E4M3)])
def test_any_format_of_one_pass_goes_with_any_of_the_other(forward, backward):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((4, 8, 64), (64, 32)))

    def loss(x, w, **formats):
        return jnp.sum(jnp.sin(jsa.nn.matmul(x, w, **formats)))

    found = jax.jit(jax.grad(loss, (0, 1)), static_argnames=("forward_dtype", "backward_dtype"))(
        x, w, forward_dtype=forward, backward_dtype=backward
    )
    for got, want in zip(found, jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(x, w)):
        assert np.linalg.norm(got - want) < 2 * np.linalg.norm(want)  # sin of a wide argument
        assert np.isfinite(got).all()


@pytest.mark.sampled(32)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("exponents", [(0, 0, 0), (-20, 3, -30), (20, 12, 30)])
@pytest.mark.parametrize("name", ["plain", "batch-last", "permuted-contracting"])
def test_inside_scalify(name, exponents, dtype):
    lhs, rhs, ct, dims = make(name)
    lhs, rhs, ct = (x.astype(dtype) for x in (lhs, rhs, ct))

    def run(a, b, c):
        out, vjp = jax.vjp(lambda x, y: jsa.nn.dot_general(x, y, dims), a, b)
        return out, *vjp(c)

    args = [ScaledArray(x, jnp.float32(2.0**e)) for x, e in zip((lhs, rhs, ct), exponents)]
    got = jax.jit(jsa.scalify(run))(*args)
    expected = reference(*(x.astype(jnp.float32) for x in (lhs, rhs, ct)), dims)
    i, j, k = exponents
    for out, want, exponent in zip(got, expected, (i + j, k + j, k + i), strict=True):
        assert out.dtype == dtype
        value = np.asarray(out.data, np.float64) * float(out.scale) * 2.0**-exponent
        tolerance = 1e-5 if dtype == "float32" else 2.0**-8  # FP8 products are summed to bfloat16
        np.testing.assert_allclose(value, want, atol=tolerance * float(jnp.abs(want).max()))


def test_results_saturate_and_take_the_asked_dtype():
    dims = (((1,), (0,)), ((), ()))
    x = jnp.full((2, 2), 1000.0)
    out = jsa.nn.dot_general(x, x, dims, preferred_element_type=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), np.float32(2 * 448**2).astype(out.dtype))
    assert jsa.nn.dot_general(x.astype(jnp.float16), x, dims).dtype == jnp.float32
    assert jsa.nn.dot_general(*[x.astype(jnp.float16)] * 2, dims).dtype == jnp.float16


def test_other_formats():
    lhs, rhs, _, dims = make("plain")
    out = jsa.nn.dot_general(lhs, rhs, dims, forward_dtype=jnp.float16, backward_dtype=E4M3)
    expected = lax.dot_general(rounded(lhs, jnp.float16), rounded(rhs, jnp.float16), dims)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_refuses_integers():
    x = jnp.ones((2, 2), jnp.int32)
    with pytest.raises(TypeError, match="`lhs` must be floating point"):
        jsa.nn.dot_general(x, x, (((1,), (0,)), ((), ())))
    x = x.astype(jnp.float32)
    for dtype in (jnp.int8, None):
        with pytest.raises(TypeError, match="`backward_dtype` must be floating point"):
            jsa.nn.dot_general(x, x, (((1,), (0,)), ((), ())), backward_dtype=dtype)


def test_under_vmap():
    lhs, rhs, _, dims = make("plain")
    stacked = jnp.stack([lhs, 2 * lhs])
    out = jax.vmap(lambda x: jsa.nn.dot_general(x, rhs, dims))(stacked)
    np.testing.assert_allclose(out[1], jsa.nn.dot_general(2 * lhs, rhs, dims), rtol=1e-6)


def test_as_the_dot_general_of_flax():
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0), dot_general=jsa.nn.dot_general)
    graph, state = nnx.split(layer)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 8)), jnp.float32)

    def loss(s, v):
        return jnp.sum(nnx.merge(graph, s)(v) ** 2)

    plain = jax.grad(loss)(state, x)
    expected = rounded(x, E4M3) @ rounded(layer.kernel[...], E4M3) + layer.bias[...]
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
    inside = jsa.scalify(jax.grad(loss))(jsa.as_scaled_array(state, "rms"), jsa.as_scaled_array(x))
    for got, want in zip(jsa.tree.leaves(inside), jax.tree.leaves(plain), strict=True):
        size = float(jnp.abs(want).max())
        np.testing.assert_allclose(np.asarray(got), want, atol=0.1 * size)
        assert np.any(np.asarray(got) != 0)


def passes(fun, args, ct):
    out, vjp = jax.vjp(fun, *args)
    return out, *vjp(ct)


MATMULS = {
    "matrices": ((5, 8), (8, 3)),
    "weights": ((2, 5, 8), (8, 3)),
    "batch": ((2, 5, 8), (2, 8, 3)),
    "broadcast": ((4, 1, 5, 8), (2, 8, 3)),
    "batch-right": ((5, 8), (4, 2, 8, 3)),
    "vector-left": ((8,), (8, 3)),
    "vector-right": ((4, 5, 8), (8,)),
    "vector-batch": ((8,), (4, 2, 8, 3)),
    "vectors": ((8,), (8,)),
    "empty": ((0, 8), (8, 3)),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", MATMULS)
def test_matmul(name):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in MATMULS[name])
    ct = jnp.asarray(rng.normal(size=jnp.matmul(a, b).shape), jnp.float32)
    got = passes(jsa.nn.matmul, (a, b), ct)
    expected = passes(jnp.matmul, (rounded(a, E4M3), rounded(b, E4M3)), rounded(ct, E5M2))
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "subscripts",
    ["btk,khd->bthd", "bthd,bshd->bhts", "bthd,hdk->btk", "ij,jk,kl->il", "...k,kn->...n"],
)
def test_einsum(subscripts):
    sizes = dict(zip("btskhdijln", (2, 5, 4, 6, 3, 7, 5, 6, 4, 3)))
    inputs = subscripts.split("->")[0].replace("...", "b").split(",")
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=[sizes[c] for c in s]), jnp.float32) for s in inputs]
    fun, plain = (lambda *a, f=f: f(subscripts, *a) for f in (jsa.nn.einsum, jnp.einsum))
    ct = jnp.asarray(rng.normal(size=plain(*args).shape), jnp.float32)
    got = passes(fun, args, ct)
    if len(args) > 2:  # the product in between is rounded too
        args = [rounded(a, E4M3) for a in args]
        np.testing.assert_allclose(got[0], plain(*args), rtol=0.2, atol=2)
        return
    expected = passes(plain, [rounded(a, E4M3) for a in args], rounded(ct, E5M2))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_a_linear_layer_adds_its_bias_afterwards():
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 5, 8), (8, 3)))
    bias = jnp.asarray([1.0, 2.0**-12, 300.5])
    out = jsa.nn.linear(x, kernel, bias)
    np.testing.assert_allclose(out, rounded(x, E4M3) @ rounded(kernel, E4M3) + bias, rtol=1e-5)
    assert jsa.nn.linear(x, kernel, bias, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"`bias` must be \(3,\), got \(8,\)"):
        jsa.nn.linear(x, kernel, x[0, 0])


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        dict(window_strides=(1, 1), padding="SAME"),
        dict(window_strides=(2, 1), padding=((1, 0), (0, 2)), rhs_dilation=(1, 2)),
        dict(window_strides=(1, 1), padding="VALID", feature_group_count=2),
    ],
    ids=["same", "strided", "grouped"],
)
def test_convolution(options, dtype):
    rng = np.random.default_rng(0)
    groups = options.get("feature_group_count", 1)
    x = jnp.asarray(rng.normal(size=(2, 4, 8, 8)), dtype)
    kernel = jnp.asarray(rng.normal(size=(6, 4 // groups, 3, 3)), dtype)
    fun, plain = (
        lambda a, b, f=f: f(a, b, **options)
        for f in (jsa.nn.conv_general_dilated, jax.lax.conv_general_dilated)
    )
    wide = [rounded(a, E4M3) for a in (x, kernel)]
    ct = jnp.asarray(rng.normal(size=plain(*wide).shape), dtype)
    got = passes(fun, (x, kernel), ct)
    expected = passes(plain, wide, rounded(ct, E5M2))
    scaled = [ScaledArray(a, jnp.float32(2.0**e)) for a, e in ((x, 5), (kernel, -3), (ct, 7))]
    under = jax.jit(jsa.scalify(lambda a, b, c: passes(fun, (a, b), c)))(*scaled)
    tolerance = 16 * float(jnp.finfo(dtype).eps)
    for a, b, c, exponent in zip(got, expected, under, (2, 4, 12), strict=True):
        assert a.dtype == c.dtype == dtype
        b = np.asarray(b, np.float64)
        limit = tolerance * np.abs(b).max()
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=limit)
        np.testing.assert_allclose(np.asarray(c, np.float64) * 2.0**-exponent, b, atol=limit)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", DIMENSIONS)
def test_the_backward_pass_in_fp8_alone(name):
    """Products of what the cotangent and the operands are in formats of their own."""
    lhs, rhs, ct, dims = make(name)
    formats = dict(forward_dtype="float32", backward_dtype=(E5M2, E4M3))
    fun = jax.jit(
        lambda a, b, c: passes(lambda *x: jsa.nn.dot_general(*x, dims, **formats), (a, b), c)
    )
    got = fun(lhs, rhs, ct)
    expected = lax.dot_general(lhs, rhs, dims), *reference(lhs, rhs, ct, dims)[1:]
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    scaled = [ScaledArray(x, jnp.float32(2.0**e)) for x, e in ((lhs, 5), (rhs, -3), (ct, 7))]
    for x, y, e in zip(jax.jit(jsa.scalify(fun))(*scaled), expected, (2, 4, 12), strict=True):
        np.testing.assert_allclose(jsa.asarray(x) * 2.0**-e, y, rtol=1e-5, atol=1e-5)


def test_the_matmuls_of_a_backward_pass_in_fp8():
    formats = dict(forward_dtype=jnp.float16, backward_dtype=(E5M2, E4M3))
    w, x = jnp.ones((8, 4), jnp.float16), jnp.ones((2, 8), jnp.float16)
    loss = jsa.fp8_matmuls(lambda w, x: jnp.sum(jnp.tanh(x @ w)), **formats)
    closed = jax.make_jaxpr(jax.grad(loss, (0, 1)))(w, x)
    dots = [e for e in all_equations(closed.jaxpr) if e.primitive.name == "dot_general"]
    operands = [{v.aval.dtype.name for v in e.invars} for e in dots]
    assert operands == [{"float16"}] + 2 * [{"float8_e5m2", "float8_e4m3fn"}]
    assert [e.outvars[0].aval.dtype.name for e in dots] == ["float32", "bfloat16", "bfloat16"]
    with pytest.raises(TypeError, match="`backward_dtype` must be one dtype or two"):
        jsa.nn.DotGeneral(backward_dtype=(E5M2,))
    with pytest.raises(ValueError, match="`hadamard` needs block formats"):
        jsa.nn.DotGeneral(backward_dtype=("mxfp4", E4M3), forward_dtype="mxfp4", hadamard=16)
    jsa.nn.DotGeneral(backward_dtype=("mxfp4", "mxfp4"), hadamard=16)
    image, kernel = jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1))
    with pytest.raises(TypeError, match="convolution, which is no matmul"):
        jsa.nn.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **formats
        )


def test_formats_of_either_operand():
    lhs, rhs, ct, dims = make("plain")
    dot = jsa.nn.DotGeneral(forward_dtype=(E5M2, jnp.bfloat16), backward_dtype=E4M3)
    got = passes(lambda a, b: dot(a, b, dims), (lhs, rhs), ct)
    wide = rounded(lhs, E5M2), rounded(rhs, jnp.bfloat16)
    expected = passes(lambda a, b: lax.dot_general(a, b, dims), wide, rounded(ct, E4M3))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="one dtype or two"):
        jsa.nn.DotGeneral(forward_dtype=(E4M3, E4M3, E4M3))
    with pytest.raises(TypeError, match="`accumulation_dtype` must be floating point"):
        jsa.nn.matmul(lhs, rhs, accumulation_dtype=jnp.int32)


@pytest.mark.parametrize(
    "shapes", [((2, 3, 8), (8, 5)), ((2, 3, 8), (8, 2, 4)), ((2, 4, 6), (4, 6, 5))]
)
def test_every_matmul_is_fp8_and_has_the_dims_that_were_given(shapes):
    """In both passes. XLA merges dims, after it has cut arrays over devices."""
    lhs, rhs = (jnp.ones(s) for s in shapes)
    contract = len(lhs.shape) - 1 if rhs.shape[0] == 8 else 1
    axes = tuple(range(contract, lhs.ndim))
    dims = (axes, tuple(range(len(axes)))), ((), ())
    step = jax.grad(lambda a, b: jnp.sum(jsa.nn.dot_general(a, b, dims)), argnums=(0, 1))
    jaxpr = jax.make_jaxpr(step)(lhs, rhs)
    dots = [e for e in all_equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert len(dots) == 3
    for eqn in dots:
        assert all(v.aval.dtype in (E4M3, E5M2) for v in eqn.invars)
        assert eqn.params["preferred_element_type"] == jnp.float32
    forward = dots[0]
    assert [v.aval.shape for v in forward.invars] == list(shapes)


def test_a_branch_without_the_matmul():
    """The other branch's residuals are zeros of an FP8 dtype."""
    lhs, rhs, _, dims = make("plain")

    def loss(a, b):
        dot = lambda: jnp.sum(jsa.nn.dot_general(a, b, dims))  # noqa: E731
        return lax.cond(a[0, 0] > 100, dot, lambda: jnp.sum(a) * jnp.sum(b))

    args = [jsa.as_scaled_array(x) for x in (lhs, rhs)]
    got = jax.jit(jsa.scalify(jax.value_and_grad(loss)))(*args)
    for a, b in zip(got, jax.value_and_grad(loss)(lhs, rhs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def derivatives(multiply, lhs, rhs):
    """Hessian-vector products of both modes, and the gradient of a penalty."""
    towards = lhs[::-1], rhs[::-1]

    def loss(at):
        return jnp.sum(jnp.tanh(multiply(*at)))

    def penalty(at):
        return sum(jnp.sum(g**2) for g in jax.grad(loss)(at))

    def along(at):
        return sum(jnp.sum(g * t) for g, t in zip(jax.grad(loss)(at), towards))

    at = lhs, rhs
    return jax.jvp(jax.grad(loss), (at,), (towards,))[1], jax.grad(along)(at), jax.grad(penalty)(at)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", ["plain", "permuted-contracting", "everything", "outer"])
def test_second_derivatives(name):
    """In formats that round nothing they are those of `lax.dot_general`."""
    lhs, rhs, _, dims = make(name)
    wide = dict(forward_dtype=jnp.float32, backward_dtype=jnp.float32)
    ours = lambda a, b: jsa.nn.dot_general(a, b, dims, **wide)  # noqa: E731
    got = jax.jit(lambda: derivatives(ours, lhs, rhs))()
    want = derivatives(lambda a, b: lax.dot_general(a, b, dims), lhs, rhs)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_second_derivatives_in_fp8_inside_scalify(dtype):
    """Small values keep theirs: they were as narrow as the operands, and nan or 0."""
    lhs, rhs, _, dims = make("plain")
    rhs = rhs / 8

    def run(a, b):
        return derivatives(lambda x, y: jsa.nn.dot_general(x, y, dims), a, b)

    want = jax.tree.leaves(derivatives(lambda a, b: lax.dot_general(a, b, dims), lhs, rhs))
    args = [jsa.as_scaled_array(x, scale="rms", dtype=dtype) for x in (lhs, rhs)]
    for given in (args, jsa.freeze_scales(args)):
        got = jax.tree.leaves(jsa.asarray(jax.jit(jsa.scalify(run))(*given), jnp.float32))
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, atol=0.15 * float(jnp.abs(y).max()))
    plain = jax.tree.leaves(run(lhs, rhs))
    for x, y in zip(plain, want, strict=True):
        np.testing.assert_allclose(x, y, atol=0.15 * float(jnp.abs(y).max()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", ["scan", "remat", "vmap"])
def test_second_derivatives_in_structures(where):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s) / 2, jnp.float32) for s in ((2, 4, 4), (3, 4)))

    def loss(w, dot):
        def layer(h, w):
            return jnp.tanh(dot(h, w)), None

        if where == "scan":
            return jnp.sum(lax.scan(layer, x, w)[0] ** 2)
        if where == "remat":
            return jnp.sum(jax.checkpoint(lambda h: layer(layer(h, w[0])[0], w[1])[0])(x) ** 2)
        return jnp.sum(jax.vmap(lambda row: layer(row[None], w[0])[0])(x) ** 2)

    wide = dict(forward_dtype=jnp.float32, backward_dtype=jnp.float32)
    dots = lambda a, b: jsa.nn.matmul(a, b, **wide), jnp.matmul  # noqa: E731
    got, want = (
        jax.jit(lambda w, d=d: jax.jvp(jax.grad(lambda w: loss(w, d)), (w,), (jnp.cos(w),))[1])(w)
        for d in dots
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert np.any(np.asarray(want))


def test_flax_layers_take_these():
    rngs, x = nnx.Rngs(0), jnp.ones((2, 6, 8))
    conv = nnx.Conv(8, 5, (3,), conv_general_dilated=jsa.nn.conv_general_dilated, rngs=rngs)
    assert conv(x).shape == (2, 6, 5)
    assert nnx.Linear(8, 5, dot_general=jsa.nn.DotGeneral(), rngs=rngs)(x).shape == (2, 6, 5)
    dense = linen.Dense(5, dot_general_cls=jsa.nn.DotGeneral)
    params = dense.init(jax.random.key(0), x)
    expected = linen.Dense(5, dot_general=jsa.nn.dot_general).apply(params, x)
    np.testing.assert_array_equal(dense.apply(params, x), expected)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("wants_gradient", [False, True])
def test_attention_of_jax_in_float16(wants_gradient, jitted):
    """Plain JAX asks for an algorithm that CPUs and TPUs do not have; its results are float32's."""
    data = np.random.default_rng(0).normal(size=(3, 2, 8, 4, 8)).astype(np.float16)

    def attend(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    def loss(*args):
        return jnp.sum(jnp.square(attend(*args).astype(jnp.float32)))

    function = jax.grad(loss, argnums=(0, 1, 2)) if wants_gradient else attend
    want = jax.jit(function)(*data.astype(np.float32))
    scaled = jsa.scalify(function)
    for scale in (1.0, jnp.float32(0.25)):
        args = [jsa.ScaledArray(jnp.asarray(x / scale, jnp.float16), scale) for x in data]
        got = (jax.jit(scaled) if jitted else scaled)(*args)
        for g, w in zip(jax.tree.leaves(jsa.asarray(got, jnp.float32)), jax.tree.leaves(want)):
            np.testing.assert_allclose(g, w, atol=4e-3 * float(np.max(np.abs(w))))
