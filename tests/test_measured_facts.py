"""One regression test for each fact and trap that was measured before the package was written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray
from tests.helpers import value

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")


def scaled(data, scale=1.0, dtype=jnp.float16):
    return ScaledArray(jnp.asarray(data, dtype), jnp.float32(scale))


@pytest.mark.parametrize(("factor", "steps"), [(0.995, 200), (0.7, 20), (1.3, 30)])
def test_repeated_constants_do_not_diverge(factor, steps):
    """Split downwards, `w * 0.995` doubled the data at every weight decay: inf at step 15."""
    step = jax.jit(jsa.scalify(lambda w: w * factor))
    w, exact = scaled([1.0, -2.0]), np.array([1.0, -2.0])
    for _ in range(steps):
        w, exact = step(w), exact * factor
        assert np.all(np.isfinite(w.data)) and np.all(w.data != 0)
    np.testing.assert_allclose(value(w), exact, rtol=0.1)


def test_a_data_range_that_is_left_goes_to_zero_and_not_to_infinity():
    step = jax.jit(jsa.scalify(lambda w: w * 0.7))
    w = scaled([1.0, -2.0])
    for _ in range(60):
        w = step(w)
    assert np.all(np.abs(value(w)) < 1e-7)


def test_constants_of_float16_arithmetic_survive_in_float32_registers():
    def adam(mu, nu):
        wide_mu, wide_nu = mu.astype(jnp.float32), nu.astype(jnp.float32)
        return (wide_mu / (jnp.sqrt(wide_nu) + 1e-8)).astype(jnp.float16)

    zero = jsa.as_scaled_array(jnp.zeros(3, jnp.float16))
    out = jsa.scalify(adam)(zero, zero)
    np.testing.assert_array_equal(value(out), [0, 0, 0])
    out = jsa.scalify(adam)(scaled(np.zeros(3), 2.0**20), scaled(np.zeros(3), 2.0**40))
    np.testing.assert_array_equal(value(out), [0, 0, 0])


def test_a_mask_does_not_wipe_out_the_logits():
    """Under a plain max rule `-1e9` gave the logits a scale of 2**30."""
    mask = np.array([True, True, False])
    for masked in (-1e9, -1e4, float(np.finfo(np.float16).min), -np.inf):
        out = jsa.scalify(lambda x, c=masked: jax.nn.softmax(jnp.where(mask, x, c)))(
            scaled([1.0, 2.0, 5.0], 2.0**-2)
        )
        expected = np.exp([0.25, 0.5]) / np.exp([0.25, 0.5]).sum()
        np.testing.assert_allclose(value(out)[:2], expected, rtol=4e-3)
        assert value(out)[2] < 1e-6


@pytest.mark.full
def test_gradient_scales_do_not_drift_with_depth():
    """Weight gradients of a residual network keep unit data without any statistics."""
    layers, width, tokens = 6, 64, 128
    rng = np.random.default_rng(0)

    def norm(x):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def loss(params, x, labels):
        for up, down in params[:-1]:
            x = x + jax.nn.gelu(norm(x) @ up) @ down
        logits = norm(x) @ params[-1]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    def draw(*shape, gain=1.0):
        return jnp.asarray(rng.normal(size=shape) * gain / np.sqrt(shape[0]), jnp.float32)

    params = [(draw(width, 2 * width), draw(2 * width, width)) for _ in range(layers)]
    params.append(draw(width, 32))
    state = jsa.as_scaled_array(params, "rms", dtype=jnp.float16)
    x = jnp.asarray(rng.normal(size=(tokens, width)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 32, tokens))
    grads = jax.jit(jsa.scalify(jax.grad(loss)))(
        state, jsa.as_scaled_array(x, dtype=jnp.float16), labels
    )
    exact = jax.grad(loss)(params, x, labels)
    for got, want in zip(jsa.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        rms = float(np.sqrt(np.mean(np.square(np.asarray(got.data, np.float64)))))
        assert 2.0**-5 < rms < 2.0**5
        error = np.linalg.norm(value(got) - want) / np.linalg.norm(want)
        assert error < 0.02


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344)])
def test_casts_to_fp8_saturate(dtype, largest):
    x = scaled([1e6, -1e6, 1.0], 2.0**10, jnp.float32)
    out = jsa.scalify(lambda v: v.astype(dtype))(x)
    np.testing.assert_array_equal(out.data.astype(jnp.float32), [largest, -largest, 1])


class TestTraps:
    def test_an_infinity_inside_an_inner_jit(self):
        """A `-inf` literal of an inner jit became a tracer, and softmax was nan."""

        @jax.jit
        def masked(x):
            return jnp.where(jnp.array([True, False, True]), x, -jnp.inf)

        out = jax.jit(jsa.scalify(lambda x: jax.nn.softmax(masked(x))))(scaled([1.0, 2.0, 1.0]))
        np.testing.assert_array_equal(value(out), [0.5, 0, 0.5])
        out = jsa.scalify(jax.nn.softmax)(scaled([1.0, 1.0], 2.0**-20))
        np.testing.assert_array_equal(value(out), [0.5, 0.5])

    @pytest.mark.parametrize("name", ["cast_on_forward", "reduce_precision_on_forward"])
    def test_forward_ops_act_under_grad(self, name):
        """Their custom_vjp forward rules returned the argument untouched."""
        op = getattr(jsa.ops, name)

        def fun(x):
            return jnp.sum(op(x, jnp.float8_e4m3fn).astype(jnp.float32) * x)

        for transform in (jax.value_and_grad(fun), jax.jit(jax.value_and_grad(fun))):
            assert float(transform(jnp.asarray([1.1]))[0]) == pytest.approx(1.125 * 1.1)
            inside = jsa.scalify(transform)(scaled([1.1], 1.0, jnp.float32))[0]
            assert float(inside) == pytest.approx(1.125 * 1.1)

    def test_rescale_acts_under_grad(self):
        def fun(x):
            return jnp.sum(jsa.get_data_and_scale(jsa.ops.dynamic_rescale_l2(x))[0])

        value, _ = jsa.scalify(jax.value_and_grad(fun))(scaled([64.0, 64.0]))
        assert float(value) == 2

    def test_asarray_multiplies_before_it_casts(self):
        """With the scale cast to float16, 40000 * 2**-25 became 0."""
        assert float(jsa.asarray(scaled([40000.0], 2.0**-25))[0]) > 0

    def test_float_to_int_knows_the_scale(self):
        out = jsa.scalify(lambda x: x.astype(jnp.int32))(scaled([1.5, -2.0], 2.0**10))
        np.testing.assert_array_equal(out, [1536, -2048])

    def test_zeros_do_not_wipe_out_a_partner(self):
        """Zeros that carried a stale scale of 2**20 flushed a partner at 2**-20."""
        zero = jsa.as_scaled_array(jnp.zeros(2, jnp.float16))
        small = scaled([1.0, 3.0], 2.0**-20)
        step = jsa.scalify(lambda z, g: (z + g, jnp.maximum(z, g), jnp.where(g > 0, g, z)))
        for out in step(zero, small):
            np.testing.assert_array_equal(value(out), np.array([1, 3]) * 2.0**-20)
        stale = jsa.dynamic_rescale(scaled([0.0, 0.0], 2.0**20))
        np.testing.assert_array_equal(value(step(stale, small)[0]), [2.0**-20, 3 * 2.0**-20])

    def test_a_float16_dot_does_not_overflow_before_its_scale(self):
        x = scaled(np.full((2, 4096), 8.0))
        out = jsa.scalify(lambda a, b: a @ b.T)(x, x)
        assert np.all(np.isfinite(out.data))
        np.testing.assert_array_equal(value(out), np.full((2, 2), 4096 * 64.0))

    def test_a_deep_residual_stream_in_float16(self):
        """`h + h @ W` died at layer 21."""

        def fun(h, w):
            for _ in range(24):
                h = h + h @ w
            return h

        rng = np.random.default_rng(0)
        w = 0.3 * rng.normal(size=(32, 32)) / np.sqrt(32)
        h = rng.normal(size=(4, 32))
        out = jsa.scalify(fun)(scaled(h), jsa.as_scaled_array(jnp.asarray(w, jnp.float16), "rms"))
        exact = fun(h.astype(np.float16).astype(float), w.astype(np.float16).astype(float))
        assert np.all(np.isfinite(out.data))
        assert np.linalg.norm(value(out) - exact) < 0.05 * np.linalg.norm(exact)

    def test_sums_of_thousands_of_terms_in_float16(self):
        x = scaled(np.full(10000, 8.0), 2.0**20)
        for fun, expected in (
            (lambda v: jnp.sum(v.reshape(10, 1000), 1), 8000 * 2.0**20),
            (lambda v: jnp.sum(v * v), 640000 * 2.0**40),
            (lambda v: jnp.var(v), 0),
            (lambda v: jnp.cumsum(v)[-1], 80000 * 2.0**20),
        ):
            np.testing.assert_allclose(value(jsa.scalify(fun)(x)), expected, rtol=2e-3)

    def test_shardings_of_an_inner_jit_stay(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        inner = jax.jit(lambda x: x * 2, in_shardings=sharding, out_shardings=sharding)
        x = scaled([1.0, 2.0])
        jaxpr = str(jax.make_jaxpr(jsa.scalify(inner))(x))
        assert jaxpr.count("sharding_constraint") >= 2
        np.testing.assert_array_equal(value(jsa.scalify(inner)(x)), [2, 4])

    def test_rules_take_parameters_that_they_do_not_know(self):
        x = scaled(np.ones((2, 2)), 4.0)
        dims = (((1,), (0,)), ((), ()))
        highest = jax.lax.Precision.HIGHEST
        for out in (
            jsa.scalify(lambda a: jax.lax.dot_general(a, a, dims, precision=highest))(x),
            jsa.scalify(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32))(x),
            jsa.scalify(lambda a: jnp.exp(a * 0) * 32)(x),
        ):
            np.testing.assert_array_equal(value(out), np.full((2, 2), 32))

    def test_a_confident_softmax_over_many_classes(self):
        """The factor n of non-negative sums, uncapped, put 65536 into the probabilities."""
        logits = np.zeros(50257)
        logits[7] = 60

        def fun(x):
            return jax.nn.softmax(x), jax.grad(lambda v: jax.nn.log_softmax(v)[7])(x)

        probabilities, grad = jax.jit(jsa.scalify(fun))(scaled(logits))
        assert np.all(np.isfinite(probabilities.data)) and np.all(np.isfinite(grad.data))
        np.testing.assert_allclose(value(probabilities)[7], 1, rtol=2e-3)

    @pytest.mark.sampled(8)
    @pytest.mark.parametrize(
        "fun",
        [
            lambda x: jax.nn.softmax(x).max(-1).sum(),
            lambda x: jnp.square(jax.nn.softmax(x)).sum(),
            lambda x: (jax.nn.softmax(x) * jax.nn.log_softmax(x)).sum(),
            lambda x: (x.max(-1) ** 3).mean(),
        ],
        ids=["largest", "gini", "entropy", "maximum"],
    )
    @pytest.mark.parametrize("classes", [16, 1000])
    def test_gradients_at_a_confident_token(self, fun, classes):
        """The gradient of a maximum divides by the number of ties: a sum that is 1, and not n."""
        x = jnp.zeros((4, classes)).at[:, 0].set(20.0).at[:, 1].set(-3.0)
        exact = np.asarray(jax.grad(fun)(x), np.float64)
        got = jax.jit(jsa.scalify(jax.grad(fun)))(scaled(x / 4, 4.0))
        assert np.all(np.isfinite(got.data))
        # `p * (1 - p)` of a p near 1 has only the digits that float16 leaves.
        np.testing.assert_allclose(value(got), exact, atol=2e-3 * np.abs(exact).max() + 1e-3)

    @pytest.mark.sampled(16)
    @pytest.mark.parametrize("length", [64, 1024])
    @pytest.mark.parametrize("size", [1, 8])
    def test_causal_attention(self, length, size):
        """Queries that see few keys: 1 / sum**2 is between 1 / n**2 and 1."""
        rng = np.random.default_rng(0)
        scores = jnp.asarray(rng.normal(size=(length, length)) * size, jnp.float32)
        values = jnp.asarray(rng.normal(size=(length, 16)), jnp.float32)
        mask = jnp.tril(jnp.ones((length, length), bool))

        def loss(scores, values):
            scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
            return jnp.sum((jax.nn.softmax(scores) @ values) ** 2)

        exact = np.asarray(jax.grad(loss)(scores, values), np.float64)
        got = jax.jit(jsa.scalify(jax.grad(loss)))(scaled(scores), scaled(values))
        assert np.linalg.norm(value(got) - exact) < 1e-2 * np.linalg.norm(exact)
        assert np.max(np.abs(got.data)) < 2.0**13


def test_a_moving_average_from_zero():
    """With a first-moment scale of 1 the error was 10.6% at step 1 in float16."""
    rng = np.random.default_rng(0)
    step = jax.jit(jsa.scalify(lambda mu, g: 0.9 * mu + 0.1 * g))
    mu, exact = jsa.as_scaled_array(jnp.zeros(256, jnp.float16)), np.zeros(256)
    for _ in range(5):
        g = jsa.as_scaled_array(jnp.asarray(rng.normal(size=256) * 1e-6, jnp.float32), "rms")
        mu, exact = step(mu, g.astype(jnp.float16)), 0.9 * exact + 0.1 * np.asarray(g, np.float64)
        assert np.linalg.norm(value(mu) - exact) < 2e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("layers", [4, 8])
def test_the_program_grows_linearly_with_depth(layers):
    """Scales by float roots and selects grew quadratically and compiled for minutes."""

    def step(params, x):
        def loss(ps):
            h = x
            for w in ps:
                h = h + jax.nn.relu(h @ w)
            return jnp.mean(h * h)

        grads = jax.grad(loss)(params)
        return [w - 0.1 * g for w, g in zip(params, grads)]

    def count(function, *args):
        return len(jax.make_jaxpr(function)(*args).eqns)

    params, x = [jnp.ones((4, 4))] * layers, jnp.ones((2, 4))
    plain = count(step, params, x)
    static = [ScaledArray(w, 0.5) for w in params]
    assert count(jsa.scalify(step), static, ScaledArray(x, 1.0)) < 5 * plain
    dynamic = [ScaledArray(w, jnp.float32(1)) for w in params]
    assert count(jsa.scalify(step), dynamic, ScaledArray(x, jnp.float32(1))) < 12 * plain


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    "clip",
    [
        lambda x: jnp.clip(x, -1, 1),
        lambda x: jnp.maximum(jnp.minimum(x, 2), -0.5),
        lambda x: jnp.minimum(jnp.maximum(jnp.minimum(x, 3), -5), 1),
        lambda x: jnp.minimum(jnp.minimum(x, 0), 1),
        lambda x: jnp.maximum(jnp.maximum(x, -100), -1),
    ],
)
def test_both_halves_of_a_clip_bound_the_scale(clip, dtype):
    # -1 at a scale of 2**54 was -2**30 in float16, and an update of that scale flushed the weights.
    data = jnp.array([0, 1, -1, 0.25, -3], dtype)
    run = jax.jit(jsa.scalify(clip))
    bounded = np.isfinite(np.asarray(clip(jnp.float32([-jnp.inf, jnp.inf])))).all()
    for exponent in (-20, 0, 20, 54):
        x = ScaledArray(data, jnp.float32(2.0**exponent))
        out = run(x)
        if bounded:
            expected = clip(x.to_array(jnp.float32))
            np.testing.assert_array_equal(jsa.asarray(out, jnp.float32), expected)
            assert float(out.scale) <= 4
        else:
            assert float(out.scale) == 2.0**exponent


@pytest.mark.parametrize("factor", [jnp.nan, jnp.inf])
def test_a_branch_that_is_not_taken_does_not_flush_the_other(factor):
    # RAdam's rectification is the root of a negative number in the first steps, and not used then.
    def f(x, factor):
        return jnp.where(jnp.isfinite(factor), factor * x, x)

    x = ScaledArray(jnp.float16([1.0, 3.0]), jnp.float32(2.0**-10))
    out = jax.jit(jsa.scalify(f))(x, jnp.float32(factor))
    np.testing.assert_array_equal(jsa.asarray(out, jnp.float32), x.to_array(jnp.float32))


def _constrained(x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, spec))


class TestWhatIsKnownOfElements:
    """A sum of n terms that are not negative grows by n, one of given terms by sqrt(n)."""

    x = ScaledArray(jnp.ones((4, 1024)), 1.0)

    @pytest.mark.parametrize(
        "move",
        [
            lambda x: _constrained(x),
            lambda x: jax.device_put(x, jax.devices()[0]),
            lambda x: jsa.match_scales(x, jnp.ones(x.shape)),
            lambda x: jsa.set_scaling(x, 4.0),
            lambda x: jsa.stop_scaling(x) * 1.0,
            lambda x: jnp.tile(x, (2, 1)),
            lambda x: x[np.array([0, 2])],
            lambda x: x.at[np.array([0, 9])].get(mode="fill", fill_value=0),
            lambda x: x.at[0].max(x[1]),
            lambda x: jnp.sort(x, 1),
        ],
        ids="constraint device_put match set stop tile rows fill max sort".split(),
    )
    def test_squares_that_are_moved_are_not_negative(self, move):
        def fun(x):
            # The scale of the terms and that of their sum.
            terms = move(x * x)
            scales = [jsa.get_data_and_scale(v)[1] for v in (terms, terms.sum(1))]
            return scales[1] / scales[0]

        assert float(jsa.asarray(jsa.scalify(fun)(self.x))) == 1024

    @pytest.mark.parametrize(
        "move",
        [
            lambda x: _constrained(x),
            lambda x: jnp.tile(x, (2, 1)),
            lambda x: x[np.array([0, 2])],
            lambda x: jnp.sort(x, 1),
            lambda x: jax.lax.top_k(x, 1024)[0],
        ],
        ids="constraint tile rows sort top_k".split(),
    )
    def test_what_is_moved_is_as_given(self, move):
        assert jsa.scalify(lambda x: move(x).sum(1))(self.x).scale == 32

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_a_negative_fill_value_is_negative(self, dtype):
        def fun(x):
            filled = abs(x).at[np.array([1, 9])].get(mode="fill", fill_value=-1000.0)
            return jnp.minimum(filled, 2.0**-10)

        for scale in (1.0, jnp.float32(1)):
            out = jsa.scalify(fun)(scaled([1.0, 2.0, 3.0], 1.0, dtype))
            np.testing.assert_array_equal(value(out), [2.0**-10, jnp.asarray(-1000.0, dtype)])
            out = jsa.scalify(fun)(ScaledArray(jnp.ones(3, dtype), scale))
            np.testing.assert_array_equal(value(out), [2.0**-10, jnp.asarray(-1000.0, dtype)])

    @pytest.mark.parametrize(
        "negative",
        [
            lambda i: i.astype(jnp.uint8).astype(jnp.int8),
            lambda i: (i.astype(jnp.int32) + 200).astype(jnp.int8),
            lambda i: jnp.square(i.astype(jnp.int8)),
            lambda i: jnp.sort(-i),
            lambda i: jax.lax.sort((abs(jnp.sin(i.astype(jnp.float32))), -i))[1],
            lambda i: jax.lax.optimization_barrier((i.astype(jnp.float32) ** 2, -i))[1],
        ],
        ids="unsigned narrow square sort along barrier".split(),
    )
    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_integers_may_be_negative(self, negative, dtype):
        """A minimum with a bound has the bound's scale if no number is negative."""

        def fun(x, i):
            return jnp.minimum(negative(i).astype(x.dtype), 2.0**-10) + 0 * x

        integers = np.array([200, 140, 130])
        expected = np.asarray(fun(jnp.ones(3), jnp.asarray(integers)))
        assert np.any(expected < -1)
        out = jsa.scalify(fun)(scaled(np.ones(3), 1.0, dtype), jnp.asarray(integers))
        np.testing.assert_array_equal(value(out), expected)

    def test_a_cast_that_holds_all_numbers_keeps_the_sign(self):
        def fun(x, i):
            wide = i.astype(jnp.uint8).astype(jnp.int32).astype(x.dtype)
            return jnp.broadcast_to(wide, x.shape).sum(1) + 0 * x[:, 0]

        out = jsa.scalify(fun)(self.x, np.ones((4, 1024), np.int32))
        assert out.scale == 1024
