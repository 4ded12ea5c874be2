"""`nn.ragged_dot`, and `fp8_matmuls` of experts: against float32 of rounded operands."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.base.jaxprs import all_equations

pytestmark = [
    pytest.mark.usefixtures("every_primitive_has_a_rule"),
    pytest.mark.sampled(6),
]

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
ALL = jsa.fp8.linear_layers
WIDE = dict(forward_dtype=jnp.float32, backward_dtype=jnp.float32)
ROWS, EXPERTS = 12, 3
SIZES = {"even": (4, 4, 4), "empty": (0, 12, 0), "first-empty": (0, 5, 7), "less": (3, 0, 4)}


def dims(contract, batch, ragged, *group):
    return lax.RaggedDotDimensionNumbers((contract, batch), [ragged], list(group))


FORMS = {
    "rows": ((12, 8), (3, 8, 5), dims(((1,), (1,)), ((), ()), 0, 0)),
    "rows-last": ((8, 12), (5, 8, 3), dims(((0,), (1,)), ((), ()), 1, 2)),
    "rows-batch": ((2, 12, 8), (3, 2, 5, 8), dims(((2,), (3,)), ((0,), (1,)), 1, 0)),
    "rows-two": ((4, 12, 2), (2, 3, 4, 5), dims(((2, 0), (0, 2)), ((), ()), 1, 1)),
    "groups": ((12, 4), (12, 5), dims(((0,), (0,)), ((), ()), 0)),
    "groups-batch": ((4, 2, 12), (12, 2, 5), dims(((2,), (0,)), ((1,), (1,)), 2)),
    "groups-two": ((12, 4, 3), (3, 5, 12), dims(((0, 2), (2, 0)), ((), ()), 0)),
}


def rounded(x, dtype):
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype).astype(jnp.float32)


def dense(lhs, rhs, sizes, numbers):
    """The same as plain sums, which JAX can differentiate as often as one likes."""
    (contract, batch), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    ends = np.cumsum(sizes)
    outs = []
    for g, end in enumerate(ends):
        rows = (np.arange(lhs.shape[ragged]) >= end - sizes[g]) & (
            np.arange(lhs.shape[ragged]) < end
        )
        shape = [1] * lhs.ndim
        shape[ragged] = -1
        own = jnp.where(rows.reshape(shape), lhs, 0)
        group = numbers.rhs_group_dimensions
        other = lax.index_in_dim(rhs, g, group[0], keepdims=False) if group else rhs
        right = [tuple(a - (a > group[0]) if group else a for a in d[1]) for d in (contract, batch)]
        outs.append(lax.dot_general(own, other, ((contract[0], right[0]), (batch[0], right[1]))))
    return sum(outs) if numbers.rhs_group_dimensions else jnp.stack(outs)


def make(name, sizes="first-empty", dtype=jnp.float32):
    lhs_shape, rhs_shape, numbers = FORMS[name]
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (lhs_shape, rhs_shape))
    out = jax.eval_shape(lambda a, b: dense(a, b, np.array(SIZES[sizes]), numbers), lhs, rhs)
    ct = jnp.asarray(rng.normal(size=out.shape), jnp.float32)
    sizes = np.array(SIZES[sizes], np.int32)
    return *(x.astype(dtype) for x in (lhs, rhs, ct)), sizes, numbers


def passes(fun, lhs, rhs, ct):
    out, vjp = jax.vjp(fun, lhs, rhs)
    return out, *vjp(ct)


def reference(lhs, rhs, ct, sizes, numbers):
    operands = rounded(lhs, E4M3), rounded(rhs, E4M3)
    return passes(lambda a, b: dense(a, b, sizes, numbers), *operands, rounded(ct, E5M2))


@pytest.mark.parametrize("name", FORMS)
def test_both_passes(name):
    for sizes in SIZES if name in ("rows", "groups") else ("first-empty",):
        lhs, rhs, ct, groups, numbers = make(name, sizes)
        fun = functools.partial(
            jsa.nn.ragged_dot_general, group_sizes=groups, ragged_dot_dimension_numbers=numbers
        )
        expected = reference(lhs, rhs, ct, groups, numbers)
        for got, want in zip(passes(fun, lhs, rhs, ct), expected, strict=True):
            assert got.shape == want.shape and got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_all_three_matmuls_are_ragged_and_fp8():
    lhs, rhs, ct, sizes, _ = make("rows", dtype=jnp.float16)

    def run(lhs, rhs, sizes):
        return passes(lambda a, b: jsa.nn.ragged_dot(a, b, sizes), lhs, rhs, ct)

    jaxpr = jax.make_jaxpr(run)(lhs, rhs, sizes)
    equations = [e for e in all_equations(jaxpr.jaxpr) if "dot" in e.primitive.name]
    assert [e.primitive.name for e in equations] == ["ragged_dot_general"] * 3
    kinds = [tuple(v.aval.dtype for v in e.invars[:2]) for e in equations]
    assert kinds == [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
    assert {e.outvars[0].aval.dtype for e in equations} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("per_expert", [False, True])
def test_inside_scalify(per_expert, dtype):
    """Dynamic and static scales, one a weight or one an expert, experts of different sizes."""
    lhs, rhs, ct, sizes, numbers = make("rows", "less", dtype)
    spread = np.array([1.0, 2.0**-6, 2.0**3])[:, None, None] if per_expert else np.ones((3, 1, 1))

    def run(a, b, c, sizes):
        return passes(lambda x, y: jsa.nn.ragged_dot(x, y, sizes), a, b, c)

    want = reference(*(x.astype(jnp.float32) for x in (lhs, rhs, ct)), sizes, numbers)
    ends = np.cumsum(sizes)
    of_row = np.ones((ROWS, 1))
    for g, end in enumerate(ends):
        of_row[end - sizes[g] : end] = spread[g, 0, 0]
    # Each expert's own power of two beside its data: rounding is the same for all.
    factors = of_row, of_row, np.ones((3, 1, 1))
    step = jax.jit(jsa.scalify(run))
    for i, j, k in ((0, 0, 0), (20, 12, 40), (-40, 0, 40), (-20, 3, -30)):
        scales = [2.0**i, spread * 2.0**j if per_expert else 2.0**j, 2.0**k]
        args = [ScaledArray(x, jnp.float32(s)) for x, s in zip((lhs, rhs, ct), scales, strict=True)]
        for given in [args, jsa.freeze_scales(args)][: 2 if k < 0 else 1]:
            got = step(*given, sizes)
            for out, value, exponent, factor in zip(got, want, (i + j, k + j, k + i), factors):
                assert out.dtype == dtype
                found = np.asarray(out.data, np.float64) * np.asarray(out.scale, np.float64)
                expected = np.asarray(value, np.float64) * factor
                size = np.abs(expected).max() * 2.0**exponent
                tolerance = 1e-5 if dtype == "float32" else 2.0**-7
                np.testing.assert_allclose(found, expected * 2.0**exponent, atol=tolerance * size)
        assert np.all(np.asarray(got[0].scale) > 0) and not np.any(np.asarray(got[0].data)[7:])


def test_a_small_expert_keeps_its_digits():
    """With a scale of its own each is rounded as if it were alone."""
    lhs, rhs, _, sizes, numbers = make("rows", "even")
    rhs = rhs * np.array([2.0**-9, 1.0, 2.0**9])[:, None, None]
    weights = jsa.as_scaled_array(rhs, scale="rms", axis=0, dtype=E4M3)
    fun = jax.jit(jsa.scalify(lambda a, b: jsa.nn.ragged_dot(a, b, sizes)))
    got = np.asarray(jsa.asarray(fun(jsa.as_scaled_array(lhs), weights), jnp.float32))
    exact = np.asarray(dense(rounded(lhs, E4M3), jsa.asarray(weights, jnp.float32), sizes, numbers))
    np.testing.assert_allclose(got[:4], exact[:4], rtol=1e-5, atol=1e-5 * np.abs(exact[:4]).max())
    np.testing.assert_allclose(got[8:], exact[8:], rtol=1e-5, atol=1e-5 * np.abs(exact[8:]).max())


def test_values_at_the_limits():
    sizes, ones = jnp.array([1, 1]), jnp.ones((2, 4, 1))
    rows = jnp.array([[1000.0, 0, 0, 0], [jnp.inf, 0, 0, 0], [jnp.nan, 0, 0, 0], [1e-9, 0, 0, 0]])
    out = jsa.nn.ragged_dot(rows, ones, jnp.array([2, 2]))[:, 0]
    np.testing.assert_array_equal(out, [448, 448, np.nan, 0])  # FP8 saturates; nan stays nan
    assert jsa.nn.ragged_dot(jnp.zeros((0, 4)), ones, jnp.array([0, 0])).shape == (0, 1)
    empty = jsa.scalify(lambda x, w: jsa.nn.ragged_dot(x, w, jnp.array([0, 0])))
    out = empty(jsa.as_scaled_array(jnp.ones((2, 4))), jsa.as_scaled_array(ones))
    np.testing.assert_array_equal(out, np.zeros((2, 1)))
    half = jnp.ones((2, 4), jnp.float16)
    assert jsa.nn.ragged_dot(half, ones, sizes).dtype == jnp.float32
    out = jsa.nn.ragged_dot(half, ones, sizes, preferred_element_type=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16


def experts(params, x, choose=2):
    """A mixture of experts that knows nothing of FP8, and the loss that balances its router."""
    tokens = x.reshape(-1, x.shape[-1])
    count = params["up"].shape[0]
    probabilities = jax.nn.softmax(tokens @ params["router"])
    weights, chosen = lax.top_k(probabilities, choose)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=count)
    source = order // choose
    hidden = jax.nn.silu(lax.ragged_dot(tokens[source], params["up"], sizes))
    out = lax.ragged_dot(hidden, params["down"], sizes)
    out = out * weights.reshape(-1)[order][:, None].astype(out.dtype)
    share = sizes.astype(probabilities.dtype) / sizes.sum()
    balance = count * jnp.sum(share * jnp.mean(probabilities, 0))
    return jnp.zeros_like(tokens).at[source].add(out).reshape(x.shape), balance


def expert_params(seed=0, width=8, hidden=16, count=4):
    rng = np.random.default_rng(seed)
    shapes = {
        "router": (width, count),
        "up": (count, width, hidden),
        "down": (count, hidden, width),
    }
    return {
        k: jnp.asarray(rng.normal(size=s) * s[-2] ** -0.5, jnp.float32) for k, s in shapes.items()
    }


def operands(fun, *args):
    """How many matmuls have which operands, by primitive."""
    found = all_equations(jax.make_jaxpr(fun)(*args).jaxpr)
    return collections.Counter(
        (e.primitive.name, *(v.aval.dtype.name for v in e.invars[:2]))
        for e in found
        if e.primitive.name in ("dot_general", "ragged_dot_general")
    )


STRUCTURES = {
    "remat": lambda fun: jax.jit(jax.checkpoint(fun)),
    "scan": lambda fun: lambda p, x: lax.scan(lambda h, _: (fun(p, h), None), x, None, length=2)[0],
}


def mean_square(fun, params, x):
    return jnp.mean(fun(params, x) ** 2)


@pytest.mark.parametrize("name", STRUCTURES)
def test_an_unmodified_mixture_of_experts(name):
    """All matmuls of both passes are FP8; in formats that round nothing it is what it was."""
    params, x = expert_params(), jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 8)))
    fun = STRUCTURES[name](lambda p, x: experts(p, x)[0])
    plain, same, fp8 = (
        jax.grad(functools.partial(mean_square, f))
        for f in (fun, jsa.fp8_matmuls(fun, ALL, **WIDE), jsa.fp8_matmuls(fun, ALL))
    )
    for a, b in zip(*(jax.tree.leaves(jax.jit(f)(params, x)) for f in (same, plain))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    kinds = operands(fp8, params, x)
    assert not any("float32" in kind for kind in kinds)
    by_default = operands(jsa.fp8_matmuls(fun), params, x)
    assert by_default[("dot_general", "float32", "float32")] == 1  # the router
    assert sum(n for k, n in kinds.items() if k[0] == "ragged_dot_general") >= 6


def test_an_unmodified_mixture_of_experts_inside_scalify():
    params, x = expert_params(), jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 8)))
    fun = lambda p, x: experts(p, x)[0]  # noqa: E731
    fp8 = jax.value_and_grad(functools.partial(mean_square, jsa.fp8_matmuls(fun)))
    plain = jax.jit(jax.value_and_grad(functools.partial(mean_square, fun)))
    want = jax.tree.leaves(plain(params, x))
    one = jsa.as_scaled_array(params, scale="rms", dtype=jnp.float16)
    each = jsa.as_scaled_array(
        params,
        scale="rms",
        dtype=jnp.float16,
        axis=lambda path, leaf: 0 if leaf.ndim == 3 else None,
    )
    x = jsa.as_scaled_array(x, dtype=jnp.float16)
    for given in (jsa.freeze_scales(one), each):
        got = jax.tree.leaves(jsa.asarray(jax.jit(jsa.scalify(fp8))(given, x), jnp.float32))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=0.2 * float(jnp.abs(b).max()) + 1e-6)


def test_a_predicate_sees_experts():
    seen = {}

    def select(matmul):
        seen[matmul.rhs_name] = matmul
        return jsa.fp8.linear_layers(matmul) and jsa.fp8.skip("down")(matmul)

    params, x = expert_params(), jnp.ones((2, 3, 8))
    fun = jsa.fp8_matmuls(lambda p, x: experts(p, x)[0], select)
    kinds = operands(fun, params, x)
    up, router = seen["[0]['up']"], seen["[0]['router']"]
    assert up.sizes == (12, 16, 8) and up.group_dimensions == (0,)
    assert router.sizes == (6, 4, 8) and router.group_dimensions == ()
    assert kinds[("ragged_dot_general", "float8_e4m3fn", "float8_e4m3fn")] == 1
    assert kinds[("ragged_dot_general", "float32", "float32")] == 1


@pytest.mark.parametrize("name", ["rows-two", "groups-batch"])
def test_second_derivatives(name):
    """Hessian-vector products, forward over reverse, and gradients of a penalty."""
    lhs, rhs, ct, sizes, numbers = make(name)
    at = lhs, rhs
    towards = jax.tree.map(lambda x: x[..., ::-1], at)

    def derivatives(multiply):
        def loss(at):
            return jnp.sum(jnp.tanh(multiply(*at, sizes, numbers)) * ct)

        def penalty(at):
            return sum(jnp.sum(g**2) for g in jax.grad(loss)(at))

        return jax.jvp(jax.grad(loss), (at,), (towards,))[1], jax.grad(penalty)(at)

    got = jax.jit(lambda: derivatives(functools.partial(jsa.nn.ragged_dot_general, **WIDE)))()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(derivatives(dense)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_refusals():
    lhs, rhs, _, sizes, _ = make("rows")
    with pytest.raises(ValueError, match=r"at most the 12 rows.*\[4, 4, 5\], which add up to 13"):
        jsa.nn.ragged_dot(lhs, rhs, np.array([4, 4, 5]))
    with pytest.raises(ValueError, match="must not be negative"):
        jsa.nn.ragged_dot(lhs, rhs, jnp.array([-1, 4, 5]))
    with pytest.raises(ValueError, match=r"`lhs` must be \(m, k\) and `rhs` \(groups, k, n\)"):
        jsa.nn.ragged_dot(rhs, lhs, sizes)
    with pytest.raises(TypeError, match="`lhs` must be floating point"):
        jsa.nn.ragged_dot(lhs.astype(jnp.int32), rhs, sizes)
    with pytest.raises(TypeError, match="np.integer"):
        jsa.nn.ragged_dot(lhs, rhs, jnp.ones(3))
    with pytest.raises(TypeError, match="group dimension size"):
        jsa.nn.ragged_dot(lhs, rhs, jnp.array([1, 1]))
    with pytest.raises(NotImplementedError, match="`group_offset` must be None"):
        jsa.nn.ragged_dot(lhs, rhs, sizes, group_offset=jnp.array(0))
    with pytest.raises(TypeError, match="exactly one rhs group dimension"):
        jsa.nn.ragged_dot_general(lhs, rhs, sizes, dims(((1,), (1,)), ((), ()), 0))


def train(steps, fp8, seed=0, dtype=jnp.float32):
    """Mean loss of the last tenth of the steps: classes that are drawn of another model's."""
    teacher, params = expert_params(7), expert_params(seed)

    def loss(p, x, labels):
        out, balance = experts(p, x)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(2 * out), labels[:, None], -1)
        return 0.01 * balance - jnp.mean(chosen)

    loss = jsa.fp8_matmuls(loss) if fp8 else loss

    def step(p, m, x, labels):
        value, grads = jax.value_and_grad(loss)(p, x, labels)
        m = jax.tree.map(lambda m, g: 0.9 * m + g.astype(m.dtype), m, grads)
        return jax.tree.map(lambda p, m: (p - 0.03 * m).astype(p.dtype), p, m), m, value

    state = params, jax.tree.map(jnp.zeros_like, params)
    if fp8:
        state = jsa.as_scaled_array(state, scale="rms", dtype=dtype)
        step = jsa.scalify(step)
    step, losses = jax.jit(step), []
    for i in range(steps):
        rng = np.random.default_rng([seed, i])
        x = rng.normal(size=(128, 8))
        logits = np.tanh(x @ np.asarray(teacher["up"][0])) @ np.asarray(teacher["down"][0])
        labels = np.argmax(2 * logits + rng.gumbel(size=logits.shape), -1)
        *state, value = step(*state, jnp.asarray(x, dtype), jnp.asarray(labels))
        losses.append(float(value))
    return losses[0], np.mean(losses[-steps // 10 :])


def test_experts_train():
    (first, plain), (_, fp8) = train(40, False), train(40, True)
    assert plain < 0.95 * first and abs(fp8 / plain - 1) < 0.01


@pytest.mark.full
def test_experts_train_as_in_float32():
    gaps = [train(1500, True, s)[1] / train(1500, False, s)[1] - 1 for s in range(4)]
    assert np.mean(gaps) < 0.002


def test_the_backward_pass_in_fp8_alone():
    lhs_shape, rhs_shape, numbers = FORMS["rows"]
    rng, sizes = np.random.default_rng(0), jnp.asarray(SIZES["even"])
    lhs, rhs, ct = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in (lhs_shape, rhs_shape, (12, 5))
    )

    def run(lhs, rhs, ct, **formats):
        fun = functools.partial(
            jsa.nn.ragged_dot_general, group_sizes=sizes, ragged_dot_dimension_numbers=numbers
        )
        out, pull = jax.vjp(lambda a, b: fun(a, b, **formats), lhs, rhs)
        return out, *pull(ct)

    got = run(lhs, rhs, ct, forward_dtype="float32", backward_dtype=(E5M2, E4M3))
    narrow = run(rounded(lhs, E4M3), rounded(rhs, E4M3), rounded(ct, E5M2), **WIDE)
    expected = run(lhs, rhs, ct, **WIDE)[0], *narrow[1:]
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
