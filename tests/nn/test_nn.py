"""`jsa.nn`: the values and gradients of `jax.nn` and optax, data near unit RMS in both passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

import jax_scalify as jsa
from jax_scalify import ScaledArray, nn

RNG = np.random.default_rng(0)
ROWS, CLASSES = 8, 64
X = RNG.normal(size=(ROWS, CLASSES))
LABELS = jnp.asarray(RNG.integers(0, CLASSES, ROWS))
PROBABILITIES = scipy.special.softmax(RNG.normal(size=X.shape), -1)
WHERE = jnp.asarray(RNG.random(X.shape) > 0.3)
QUERY = RNG.normal(size=(2, 6, 4, 8))
KEY, VALUE = RNG.normal(size=(2, 2, 6, 2, 8))
MASK = jnp.asarray((RNG.random((2, 1, 6, 6)) > 0.3) | np.eye(6, dtype=bool))
GAMMA, BETA = RNG.normal(size=(2, CLASSES))
IMAGES = RNG.normal(size=(4, 3, 3, 8))
EPSILON = 1e-5


def normalised(x, axis, center=True):
    x = x - center * jnp.mean(x, axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis, keepdims=True) + EPSILON)


def grouped(x):
    parts = x.reshape(4, 3, 3, 2, 4)
    return normalised(parts, (1, 2, 4)).reshape(x.shape)


def cross_entropy(x, **_):
    """With label smoothing 0.1, z-loss 0.01 and weights."""
    targets = optax.smooth_labels(jax.nn.one_hot(LABELS, CLASSES, dtype=x.dtype), 0.1)
    losses = optax.softmax_cross_entropy(x, targets) + 0.01 * jax.nn.logsumexp(x, -1) ** 2
    weights = (jnp.arange(ROWS) < 5).astype(x.dtype)
    return jnp.sum(losses * weights) / 5


SMOOTHED = dict(label_smoothing=0.1, z_loss=0.01, weights=jnp.arange(ROWS) < 5)
# Our function, its counterpart, the operands; those of the first scale, and of others scale 1.
FUNCTIONS = {
    "relu": (nn.relu, jax.nn.relu, [X]),
    "leaky_relu": (nn.leaky_relu, jax.nn.leaky_relu, [X]),
    "leaky_relu-0.5": (lambda x: nn.leaky_relu(x, 0.5), lambda x: jax.nn.leaky_relu(x, 0.5), [X]),
    "gelu": (nn.gelu, jax.nn.gelu, [X]),
    "gelu-exact": (
        functools.partial(nn.gelu, approximate=False),
        functools.partial(jax.nn.gelu, approximate=False),
        [X],
    ),
    "silu": (nn.silu, jax.nn.silu, [X]),
    "elu": (nn.elu, jax.nn.elu, [X]),
    "squared_relu": (nn.squared_relu, lambda x: jax.nn.relu(x) ** 2, [X]),
    "sigmoid": (nn.sigmoid, jax.nn.sigmoid, [X]),
    "tanh": (nn.tanh, jnp.tanh, [X]),
    "softplus": (nn.softplus, jax.nn.softplus, [X]),
    "glu": (nn.glu, jax.nn.glu, [X]),
    "glu-axis": (lambda x: nn.glu(x, 0), lambda x: jax.nn.glu(x, 0), [X]),
    "swiglu": (nn.swiglu, lambda x: x[:, :32] * jax.nn.silu(x[:, 32:]), [X]),
    "geglu": (nn.geglu, lambda x: x[:, :32] * jax.nn.gelu(x[:, 32:]), [X]),
    "softmax": (nn.softmax, jax.nn.softmax, [X]),
    "softmax-axes": (lambda x: nn.softmax(x, (0, 1)), lambda x: jax.nn.softmax(x, (0, 1)), [X]),
    "softmax-where": (
        lambda x: nn.softmax(x, where=WHERE),
        lambda x: jax.nn.softmax(x, where=WHERE),
        [X],
    ),
    "log_softmax": (nn.log_softmax, jax.nn.log_softmax, [X]),
    "logsumexp": (nn.logsumexp, jax.nn.logsumexp, [X]),
    "logsumexp-axis": (
        lambda x: nn.logsumexp(x, -1, keepdims=True, where=WHERE),
        lambda x: jax.nn.logsumexp(x, -1, keepdims=True, where=WHERE),
        [X],
    ),
    "layer_norm": (
        lambda x, g, b: nn.layer_norm(x, g, b, epsilon=EPSILON),
        lambda x, g, b: normalised(x, -1) * g + b,
        [X, GAMMA, BETA],
    ),
    "rms_norm": (
        lambda x, g: nn.rms_norm(x, g, epsilon=EPSILON),
        lambda x, g: normalised(x, -1, center=False) * g,
        [X, GAMMA],
    ),
    "group_norm": (lambda x: nn.group_norm(x, 2, epsilon=EPSILON), grouped, [IMAGES]),
    "batch_norm": (
        lambda x: nn.batch_norm(x, epsilon=EPSILON)[0],
        lambda x: normalised(x, (0, 1, 2)),
        [IMAGES],
    ),
    "softmax_cross_entropy_with_integer_labels": (
        lambda x: nn.softmax_cross_entropy_with_integer_labels(x, LABELS),
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, LABELS),
        [X],
    ),
    "softmax_cross_entropy": (
        nn.softmax_cross_entropy,
        optax.softmax_cross_entropy,
        [X, PROBABILITIES],
    ),
    "cross_entropy": (lambda x: nn.cross_entropy(x, LABELS, **SMOOTHED), cross_entropy, [X]),
    "sigmoid_binary_cross_entropy": (
        nn.sigmoid_binary_cross_entropy,
        optax.sigmoid_binary_cross_entropy,
        [X, PROBABILITIES],
    ),
    "squared_error": (
        lambda x: nn.squared_error(x, x[::-1]),
        lambda x: optax.squared_error(x, x[::-1]),
        [X],
    ),
    "embed": (lambda x: nn.embed(x, LABELS % ROWS), lambda x: x[LABELS % ROWS], [X]),
    "dropout": (
        lambda x: nn.dropout(x, 0.25, jax.random.key(0)),
        lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.75, x.shape), x / 0.75, 0),
        [X],
    ),
    "residual_add": (
        lambda x: nn.residual_add(x, x[::-1]),
        lambda x: x + x[::-1],
        [X],
    ),
}
for _name, _options in {"": {}, "-causal": dict(is_causal=True), "-mask": dict(mask=MASK)}.items():
    FUNCTIONS[f"dot_product_attention{_name}"] = (
        functools.partial(nn.dot_product_attention, **_options),
        functools.partial(jax.nn.dot_product_attention, **_options),
        [QUERY, KEY, VALUE],
    )
SCALES = [2.0**-20, 2.0**-4, 1.0, 2.0**4, 2.0**20]
# Where a float32 gradient is a small difference of large numbers, of which both are rounded.
CANCELLING = {
    "sigmoid_binary_cross_entropy": SCALES[:1],
    "dot_product_attention": SCALES[3:],
    "dot_product_attention-causal": SCALES[3:],
    "dot_product_attention-mask": SCALES[3:],
}


def is_hard_maximum(name, scale):
    """Whether the rounding of scores in 16 bits decides which element is picked."""
    picks = "attention" in name or "softmax" in name or "logsumexp" in name
    return scale > 1 and picks and "entropy" not in name


def weights_of(fun, args):
    shape = jax.eval_shape(fun, *args).shape
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


def gradient(fun, weights, count):
    def loss(*args):
        return jnp.sum(fun(*args).astype(jnp.float32) * weights)

    return jax.grad(loss, tuple(range(count)))


def arrays(operands, scale, dtype=jnp.float32):
    return [jnp.asarray(x * (scale if i == 0 else 1), dtype) for i, x in enumerate(operands)]


def scaled(operands, scale, dtype=jnp.float32):
    return [
        ScaledArray(jnp.asarray(x, dtype), jnp.float32(scale if i == 0 else 1))
        for i, x in enumerate(operands)
    ]


def assert_close(got, expected, tolerance):
    for a, b in zip(got, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max() + 1e-37)


def with_gradient(fun, weights, count):
    """A function that returns its result and its gradients."""
    slopes = gradient(fun, weights, count)
    return lambda *args: (fun(*args), slopes(*args))


@pytest.mark.sampled(8)
@pytest.mark.optimized
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_the_plain_function(name):
    fun, plain, operands = FUNCTIONS[name]
    weights, count = weights_of(plain, arrays(operands, 1.0)), len(operands)
    ours, counterpart = (with_gradient(f, weights, count) for f in (fun, plain))
    run = jax.jit(jsa.scalify(ours))
    run_plain = jax.jit(lambda *args: (ours(*args), counterpart(*args)))
    for scale in SCALES:
        (value, slopes), (expected, gradients) = run_plain(*arrays(operands, scale))
        scaled_value, scaled_slopes = run(*scaled(operands, scale))
        assert_close([value, scaled_value], [expected, expected], 1e-6)
        if scale not in CANCELLING.get(name, ()):
            assert_close([*slopes, *scaled_slopes], [*gradients, *gradients], 1e-6)


@pytest.mark.sampled(32)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_16_bit_data_at_any_scale(name, dtype):
    """Also where the plain function would overflow or underflow."""
    fun, plain, operands = FUNCTIONS[name]
    weights, count = weights_of(plain, arrays(operands, 1.0)).astype(dtype), len(operands)
    epsilon = float(jnp.finfo(dtype).eps)
    run = jax.jit(jsa.scalify(with_gradient(fun, weights, count)))
    run_plain = jax.jit(with_gradient(plain, weights.astype(jnp.float32), count))
    for scale in SCALES[::2]:
        ours = scaled(operands, scale, dtype)
        got, slopes = run(*ours)
        expected, gradients = run_plain(*(x.to_array(jnp.float32) for x in ours))
        assert {x.dtype for x in (got, *slopes)} == {jnp.dtype(dtype)}
        if not is_hard_maximum(name, scale):
            assert_close([got.to_array(jnp.float32)], [expected], 8 * epsilon)
            if name not in CANCELLING:
                wide = [x.to_array(jnp.float32) for x in slopes]
                assert_close(wide, gradients, 16 * epsilon)


# What is not an ordinary number, and what is refused.


def test_an_element_that_is_picked_keeps_its_gradient_in_float16():
    x = ScaledArray(jnp.ones((2, 50257), jnp.float16), jnp.float32(1))
    ids = jnp.array([[3], [4]])
    picks = jax.grad(lambda x: (jnp.take_along_axis(x, ids, 1) * 2000.0).sum())
    assert float(jnp.max(jsa.scalify(picks)(x).to_array())) == 2000
    out = jsa.scalify(lambda u: jnp.zeros(1024, jnp.float16).at[3].add(u[0]))
    assert float(jnp.max(out(ScaledArray(jnp.full(1, 4000, jnp.float16), 1.0)).to_array())) == 4000


@pytest.mark.sampled(16)
@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (3, 3)])
def test_operands_with_a_scale_an_axis(shape):
    scales = 2.0 ** jnp.arange(9)[: np.prod(shape)].reshape(shape).astype(jnp.float32)
    x = ScaledArray(jnp.asarray(X[:3, :3], jnp.float32), scales)
    y = ScaledArray(jnp.ones(3), jnp.array([1.0, 2.0, 4.0]))
    functions = {
        nn.logsumexp: (jax.nn.logsumexp, (x,)),
        nn.softmax: (jax.nn.softmax, (x,)),
        nn.silu: (jax.nn.silu, (x,)),
        nn.squared_error: (lambda x, y: (x - y) ** 2, (x, y)),
        nn.sigmoid_binary_cross_entropy: (optax.sigmoid_binary_cross_entropy, (x, y)),
    }
    for ours, (plain, args) in functions.items():
        values = [a.to_array() for a in args]
        assert_close([jax.jit(jsa.scalify(ours))(*args)], [plain(*values)], 1e-6)
        slope, expected = (
            jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a) / 512))) for f in (ours, plain)
        )
        slope, expected = jax.jit(jsa.scalify(slope))(*args), jax.jit(expected)(*values)
        assert_close([slope], [expected], 1e-6)


def test_weights_of_a_loss():
    logits, labels = jnp.asarray(X, jnp.float32), LABELS
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    weights = jnp.linspace(0, 0.25, ROWS)
    expected = jnp.sum(losses * weights) / jnp.sum(weights)
    assert_close([nn.cross_entropy(logits, labels, weights=weights)], [expected], 1e-6)
    assert nn.cross_entropy(logits, labels, weights=jnp.zeros(ROWS)) == 0
    with pytest.raises(ValueError, match="`weights` must have the shape of `labels`"):
        nn.cross_entropy(logits, labels, weights=weights[:, None])
    many = ScaledArray(jnp.zeros((100_000, 4), jnp.float16), jnp.float32(1))
    mean = jsa.scalify(
        lambda x: nn.cross_entropy(x, jnp.zeros(100_000, int), weights=jnp.ones(100_000))
    )
    assert float(mean(many)) == pytest.approx(np.log(4), rel=1e-3)


def test_a_row_without_classes_has_no_loss():
    logits, where = jnp.ones((2, 3)), jnp.array([[False] * 3, [True] * 3])
    for fun in (nn, optax):
        loss = functools.partial(
            fun.softmax_cross_entropy_with_integer_labels, labels=jnp.array([0, 2]), where=where
        )
        np.testing.assert_allclose(loss(logits), [0, np.log(3)], rtol=1e-6)
        gradient = jax.grad(lambda x, f=loss: f(x).sum())(logits)
        np.testing.assert_allclose(gradient, [[0, 0, 0], [1 / 3, 1 / 3, -2 / 3]], atol=1e-6)


def test_other_dtypes():
    logits = ScaledArray(jnp.ones((3, 4), jnp.float16), jnp.float32(2))
    onehot = jax.nn.one_hot(jnp.arange(3), 4, dtype=int)
    for labels in (onehot, onehot.astype(jnp.float32), onehot.astype(bool)):
        for fun in (nn.softmax_cross_entropy, nn.sigmoid_binary_cross_entropy):
            grad = jsa.scalify(jax.grad(lambda x, f=fun, y=labels: f(x, y).sum().astype(x.dtype)))
            assert grad(logits).dtype == jnp.float16


def test_plain_arrays_stay_plain():
    x = jnp.asarray(X, jnp.float32)
    for fun in (nn.layer_norm, nn.softmax, nn.gelu):
        assert isinstance(jsa.scalify(fun)(x), jax.Array)


REFUSED = {
    "integers-norm": (TypeError, "`x` must be floating point", lambda: nn.rms_norm(LABELS)),
    "integers-dropout": (
        TypeError,
        "`x` must be floating point",
        lambda: nn.dropout(LABELS, 0.5, jax.random.key(0)),
    ),
    "rate": (ValueError, "`rate` must be in", lambda: nn.dropout(X, 1.5)),
    "key": (ValueError, "`key` is needed", lambda: nn.dropout(X, 0.5)),
    "mask": (
        TypeError,
        "`mask` must be bool",
        lambda: nn.dot_product_attention(QUERY, KEY, VALUE, mask=jnp.zeros((6, 6))),
    ),
    "labels": (
        TypeError,
        "`labels` must be integers",
        lambda: nn.softmax_cross_entropy_with_integer_labels(X, jnp.ones(ROWS)),
    ),
    "groups": (ValueError, "`num_groups` must divide", lambda: nn.group_norm(IMAGES, 3)),
    "groups-float": (TypeError, "`num_groups` must be an int", lambda: nn.group_norm(IMAGES, 1.5)),
    "axis-glu": (ValueError, "`axis` must be at least -2", lambda: nn.glu(X, 2)),
    "axis-norm": (ValueError, "`axis` must be at least -2", lambda: nn.layer_norm(X, axis=(0, 7))),
    "axis-name": (TypeError, "`axis` must be an int or", lambda: nn.softmax(X, axis="a")),
    "axis-scalified": (
        ValueError,
        "`axis` must be at least -2",
        lambda: jsa.scalify(lambda x: nn.log_softmax(x, axis=5))(jsa.as_scaled_array(X)),
    ),
    "residual": (ValueError, "must agree in shape", lambda: nn.residual_add(X, X[:1])),
    "halves": (ValueError, "even size", lambda: nn.swiglu(X[:, :3])),
    "heads": (
        ValueError,
        "`key` must have the batch",
        lambda: nn.dot_product_attention(QUERY[:, :, :3], KEY, VALUE),
    ),
    "no-heads": (
        ValueError,
        "must have heads and channels",
        lambda: nn.dot_product_attention(QUERY, KEY[:, :, :0], VALUE[:, :, :0]),
    ),
    "ranks": (
        ValueError,
        r"must have shapes .*got \(6, ",
        lambda: nn.dot_product_attention(QUERY[0], KEY, VALUE),
    ),
    "bias": (
        ValueError,
        "`bias` must broadcast to",
        lambda: nn.dot_product_attention(QUERY, KEY, VALUE, jnp.zeros((3, *QUERY.shape))),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_at_the_door(name):
    error, message, call = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
def test_a_constant_that_is_added_to_one_of_many_zeros_stays(dtype):
    number = 300j if dtype == "complex64" else -300.0
    x = ScaledArray(jnp.ones(1, dtype), jnp.float32(2))
    out = jsa.scalify(lambda x: (x, jnp.zeros(65536, dtype).at[3].add(number)))(x)[1]
    assert np.asarray(out)[3] == number


@pytest.mark.sampled(8)
@pytest.mark.parametrize("query", [(0, 4, 2, 8), (1, 0, 2, 8), (1, 4, 2, 8)])
@pytest.mark.parametrize("sources", [0, 4])
def test_attention_of_nothing(query, sources):
    x, y = jnp.ones(query), jnp.ones((query[0], sources, 2, 8))
    expected = jax.nn.dot_product_attention(x, y, y)

    def loss(*args):
        return nn.dot_product_attention(*args).sum()

    both = lambda *args: (nn.dot_product_attention(*args), jax.grad(loss, (0, 1, 2))(*args))  # noqa: E731
    got, gradients = jax.jit(jsa.scalify(both))(*(jsa.as_scaled_array(a) for a in (x, y, y)))
    np.testing.assert_array_equal(got, expected)
    plain = jax.jit(jax.grad(loss, (0, 1, 2)))(x, y, y)
    for got, want in zip(gradients, plain, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
@pytest.mark.parametrize(
    "fun",
    [nn.relu, nn.gelu, nn.silu, nn.elu, nn.sigmoid, nn.tanh, nn.softplus, nn.squared_relu]
    + [nn.leaky_relu, nn.layer_norm, nn.rms_norm, nn.log_softmax, nn.residual_add],
    ids=lambda fun: fun.__name__,
)
def test_empty_arrays(fun, shape):
    args = [jnp.ones(shape)] * (2 if fun is nn.residual_add else 1)
    expected = fun(*args)
    got, gradient = jsa.scalify(
        lambda *args: (fun(*args), jax.grad(lambda x: fun(x, *args[1:]).sum())(args[0]))
    )(*[jsa.as_scaled_array(a) for a in args])
    assert got.shape == expected.shape == gradient.shape == shape


@pytest.mark.parametrize("norm", [jsa.nn.layer_norm, jsa.nn.rms_norm])
def test_a_negative_epsilon(norm):
    x = jnp.ones((2, 3), jnp.float16)
    fun = functools.partial(norm, epsilon=-0.1)
    for call in (fun, jsa.scalify(fun), jsa.scalify(jax.grad(lambda x: jnp.sum(fun(x))))):
        with pytest.raises(ValueError, match="`epsilon` must not be negative, got -0.1"):
            call(x if call is fun else jsa.as_scaled_array(x))


def test_the_arguments_that_are_stored():
    x = jnp.float16([[3.1, 2.7]])
    gradients = [
        jax.grad(lambda x: jnp.sum(jsa.nn.store_inputs(jnp.square, argnums=which)(x)))(x)  # noqa: B023
        for which in (0, -1, [0])
    ]
    np.testing.assert_array_equal(gradients[0], [[6, 5.5]])  # 3.1 and 2.7 in E4M3 are 3 and 2.75
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, gradients[0])
    with pytest.raises(ValueError, match="`argnums` is 1, but there are 1 arguments"):
        jax.grad(lambda x: jnp.sum(jsa.nn.store_inputs(jnp.square, argnums=1)(x)))(x)
    with pytest.raises(TypeError, match="`argnums` must be an int or a sequence of ints, got 'a'"):
        jsa.nn.store_inputs(jnp.square, argnums="a")


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("exponent", [-40, -20, 0, 20, 40])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_relative_epsilon(name, dtype, exponent, static):
    """Balanca et al. 2024, C.2: data is normalised, whatever its scale is."""
    rng, epsilon = np.random.default_rng(0), 1e-3
    data, cotangent = (jnp.asarray(rng.normal(size=(4, 32)), dtype) for _ in range(2))
    scale = 2.0**exponent if static else jnp.float32(2.0**exponent)

    def norm(x, cotangent):
        fun = functools.partial(getattr(nn, name), epsilon=epsilon, relative_epsilon=True)
        value, pullback = jax.vjp(fun, x)
        return value, pullback(cotangent)[0]

    x = ScaledArray(data, scale)
    value, gradient = jax.jit(jsa.scalify(norm))(x, jsa.as_scaled_array(cotangent))
    d, g = np.float64(data), np.float64(cotangent)
    d = d - d.mean(-1, keepdims=True) if name == "layer_norm" else d
    root = np.sqrt(np.mean(d**2, -1, keepdims=True) + epsilon)
    normal = d / root
    wanted = g - normal * np.mean(g * normal, -1, keepdims=True)
    wanted = wanted - wanted.mean(-1, keepdims=True) if name == "layer_norm" else wanted
    unit = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(jsa.asarray(value, jnp.float32), normal, atol=8 * unit)
    got = np.float64(gradient.data) * float(gradient.scale) * 2.0**exponent
    np.testing.assert_allclose(got, wanted / root, atol=16 * unit)
    plain = getattr(nn, name)(data, epsilon=epsilon, relative_epsilon=True)
    np.testing.assert_array_equal(plain, getattr(nn, name)(data, epsilon=epsilon))
