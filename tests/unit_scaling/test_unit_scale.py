"""`unit_scale` as a transform, `unit_parameters`, and the report."""

import math

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import unit_scaling as us
from jax_scalify.unit_scaling.automatic import measuring
from tests.helpers import compiled

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(8, 16)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(16, 16)), jnp.float32)
LABELS = jnp.arange(8)


def loss(w, x, labels):
    logits = jax.nn.relu(x @ w[0]) @ w[1]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def rms(x):
    return float(jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))))


def rows(fun, *args, **options):
    return us.unit_scale(fun, **options).report(*args).rows


def test_transforms_compose():
    scaled, args = us.unit_scale(loss), ([W, W.T], X, LABELS)

    def all_of_them(w, x, labels):
        value, grads = jax.value_and_grad(scaled)(w, x, labels)
        value_of_jit, grads_of_jit = jax.value_and_grad(jax.jit(scaled))(w, x, labels)
        each = jax.vmap(scaled, (None, 0, 0))(w, x[:, None], labels[:, None])
        tangent = jax.jvp(lambda w: scaled(w, x, labels), (w,), (w,))[1]
        closed = jax.grad(lambda w: us.unit_scale(lambda x: loss(w, x, labels))(x))(w)
        return (value, grads, closed), (value_of_jit, grads_of_jit, grads), each, tangent

    got, expected, each, tangent = compiled(all_of_them, *args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)
    np.testing.assert_allclose(each.mean(), got[0], rtol=0.01)  # factors of other shapes
    assert jnp.isfinite(tangent)


def test_it_composes_with_scalify():
    grad = jax.grad(us.unit_scale(loss))

    def both(w, x, labels):
        scaled = jsa.scalify(grad)(jsa.as_scaled_array(w), jsa.as_scaled_array(x), labels)
        return jsa.asarray(scaled), grad(w, x, labels)

    got, expected = compiled(both, [W, W.T], X, LABELS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)


def test_every_gradient_of_a_loss_has_unit_scale():
    grads = compiled(jax.grad(us.unit_scale(loss)), [W, W.T], X, LABELS)
    assert all(0.5 < rms(g) < 2 for g in grads)
    (last,) = [r for r in rows(loss, [W, W.T], X, LABELS) if r.shape == ()]
    assert last.alpha == 1 and last.note.startswith("gradients of the loss by")


def test_the_loss_itself_is_not_scaled():
    target = X @ W / 4 + 1.0
    value = us.unit_scale(lambda w, y: jnp.mean((X @ w / 4 - y) ** 2))(W, target)
    product = rows(lambda w, y: jnp.mean((X @ w / 4 - y) ** 2), W, target)[0]
    expected = jnp.mean((product.alpha * (X @ W) / 4 - target) ** 2)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_auxiliary_results_do_not_bind_the_loss():
    def fun(w):
        logits = jnp.tanh(X @ w)
        return jnp.mean(logits**2), logits

    plain = compiled(jax.grad(us.unit_scale(lambda w: fun(w)[0])), W).ravel()
    both, logits = compiled(jax.grad(us.unit_scale(fun), has_aux=True), W)
    np.testing.assert_allclose(both.ravel() / rms(both), plain / rms(plain), atol=1e-4)
    assert 0.25 < rms(both) < 4 and 0.25 < rms(plain) < 4
    assert rms(logits) < 1  # of the tail: it is not scaled


def test_several_results_are_one_end():
    def fun(x, w):
        return x @ w, jnp.tanh(x) @ w

    assert not any(any(r.cut_edges) for r in rows(fun, X, W))
    assert all(r.cut_edges[1] for r in rows(lambda x, w: x @ w, X, W))


def test_rules_of_derivatives_are_kept():
    @jax.custom_vjp
    def clipped(x):
        return jnp.where(x > 0, jnp.log(x), 0)

    clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.where(x > 0, g, 0),))
    scaled = us.unit_scale(lambda w: jnp.mean(clipped(jax.nn.relu(X @ w))))
    assert jnp.isfinite(compiled(jax.grad(scaled), W)).all()  # of the plain function it is nan
    zero = jax.grad(us.unit_scale(lambda w: jnp.sum(jax.nn.relu(X @ w))))(jnp.zeros_like(W))
    np.testing.assert_array_equal(zero, 0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("options", [{}, {"rhs_dilation": (2,)}, {"lhs_dilation": (2,)}])
def test_convolutions_count_the_terms(padding, options):
    x, kernel = jnp.ones((2, 9, 4)), jnp.ones((3, 4, 8))

    def fun(x, kernel):
        dims = ("NWC", "WIO", "NWC")
        pads = [(1, 1)] if "lhs_dilation" in options else padding
        return jax.lax.conv_general_dilated(
            x, kernel, (2,), pads, dimension_numbers=dims, **options
        )

    (row,) = rows(fun, x, kernel, constraint=None)
    out, pull = jax.vjp(fun, x, kernel)
    sums = [out, *pull(jnp.ones_like(out))]  # of ones: the number of terms
    for factor, terms in zip([row.alpha, *row.betas], sums, strict=True):
        np.testing.assert_allclose(factor, 1 / math.sqrt(terms.mean()), rtol=1e-6)


def test_products_and_look_ups():
    (row,) = rows(lambda x, w: jnp.einsum("bi,io->bo", x, w), X, jnp.ones((16, 4)), constraint=None)
    np.testing.assert_allclose([row.alpha, *row.betas], [1 / 4, 1 / 2, 1 / math.sqrt(8)])
    table, ids = jnp.ones((32, 4)), jnp.zeros(8, int)
    (row,) = rows(lambda table, ids: table[ids], table, ids)
    assert (row.kind, row.alpha, row.betas) == ("lookup", 1, (2,))
    one_hot = rows(lambda table, ids: jax.nn.one_hot(ids, 32) @ table, table, ids)[0]
    np.testing.assert_allclose([one_hot.alpha, *one_hot.betas], [1, 2], rtol=1e-5)


def test_tied_weights_are_at_no_cut_edge():
    def tied(table, ids):
        return jnp.tanh(table[ids]) @ table.T

    uses = [r for r in rows(tied, W, LABELS) if "args[0]" in r.operands]
    assert uses and not any(r.cut_edges[r.operands.index("args[0]")] for r in uses)


def test_sums_have_equal_shares():
    def fun(x, ws):
        h = x
        for w in ws:
            h = h + jnp.tanh(h @ w)
        return h @ ws[0].T + x @ ws[1].T + jnp.ones(16)

    found = [r for r in rows(fun, X, [W, W.T, W]) if r.weights]
    expected = [(n / (n + 1), 1 / (n + 1)) for n in (1, 2, 3)] + [(0.5, 0.5)]
    np.testing.assert_allclose([np.square(r.weights) for r in found], expected)
    assert [r.kind for r in found] == ["residual sum"] * 3 + ["sum"]


def test_biases_and_gains_keep_a_function_at_unit_scale():
    def fun(w, b, gain):
        return (X @ w + b) * gain

    def layer_norm(x, b, gain):
        x = x - x.mean(1, keepdims=True)
        return x * jax.lax.rsqrt(x.var(1, keepdims=True) + 1e-6) * gain + b

    b, gain = jnp.zeros(16), jnp.ones(16)
    for found in (rows(fun, W, b, gain)[1], rows(layer_norm, X, b, gain)[0]):
        assert found.alpha == 1
        betas = dict(zip(found.operands, found.betas, strict=True))
        for name in ("args[1]", "args[2]"):
            np.testing.assert_allclose(betas[name], 1 / math.sqrt(8), rtol=0.15)


def test_nnx():
    class Model(flax.nnx.Module):
        def __init__(self, rngs):
            self.norm = flax.nnx.LayerNorm(16, rngs=rngs)
            self.linear = flax.nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            return x + self.linear(flax.nnx.gelu(self.norm(x)))

    graph, state = flax.nnx.split(Model(flax.nnx.Rngs(0)))
    state = us.unit_parameters(state)

    def apply(state, x):
        return flax.nnx.merge(graph, state)(x)

    out = compiled(us.unit_scale(apply), state, X)
    assert 0.7 < rms(out) < 1.4
    kinds = [r.kind for r in us.unit_scale(apply).report(state, X).rows]
    assert "residual sum" in kinds


def test_dropout_and_half_precision():
    def fun(w, key):
        h = jax.nn.gelu(X.astype(jnp.bfloat16) @ w)
        keep = jax.random.bernoulli(key, 0.5, h.shape)
        return jnp.mean(jnp.where(keep, h / 0.5, 0) ** 2)

    for key in (KEY, jax.random.PRNGKey(0)):
        grad = compiled(jax.grad(us.unit_scale(fun)), W.astype(jnp.bfloat16), key)
        assert grad.dtype == jnp.bfloat16 and 0.5 < rms(grad) < 2


def test_control_flow_without_parameters(capsys):
    def fun(w):
        h = jax.lax.while_loop(lambda h: h.sum() < -1e9, jnp.tanh, X @ w)
        h = jax.lax.cond(h.sum() > 0, jnp.sin, jnp.tanh, h)
        jax.debug.print("seen {}", 7)
        return h

    assert us.unit_scale(fun)(W).shape == (8, 16)
    assert "seen 7" in capsys.readouterr().out
    assert "not measured" not in str(us.unit_scale(fun).report(W))


def test_what_cannot_be_measured_is_said():
    def refuse(x):
        raise RuntimeError("only once")

    def fun(x):
        y = jax.pure_callback(refuse, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return y @ W

    with pytest.warns(UserWarning, match="`pure_callback` at .* as it is, for it cannot be run"):
        found = us.unit_scale(fun).report(X).rows
    (row,) = [r for r in found if "not measured" in r.note]
    assert row.alpha == 1 and row.operation == "pure_callback"


def test_small_operands_of_large_results_are_sampled_once(monkeypatch):
    drawn = []
    sample = measuring._sample
    monkeypatch.setattr(measuring, "_sample", lambda *a: drawn.append(a[-1]) or sample(*a))
    rows(lambda x: jnp.sin(jnp.broadcast_to(x, (2**13, 7))) * 2, jnp.ones(7))
    assert drawn == [1, 1]


def test_many_samples_are_drawn_on_the_device(monkeypatch):
    few = rows(lambda x: jnp.tanh(x) * 3, X, constraint=None)[0]
    monkeypatch.setattr(measuring, "_MANY", 0)
    many = rows(lambda x: jnp.tanh(x) * 3, jnp.ones((64, 256)), constraint=None)[0]
    np.testing.assert_allclose([many.alpha, *many.betas], [few.alpha, *few.betas], rtol=0.03)
    z = np.random.default_rng(0).normal(size=100_000)
    np.testing.assert_allclose(few.alpha, 1 / (3 * np.sqrt(np.mean(np.tanh(z) ** 2))), rtol=0.01)


def test_the_report_is_a_table():
    text = str(us.unit_scale(loss).report([W, W.T], X, LABELS))
    lines = text.splitlines()
    assert lines[0].split()[:2] == ["scope", "operation"] and len(lines) == 5
    assert "args[0][0] 0.3536*" in lines[1] and "test_unit_scale.py:" in lines[1]
    assert lines[2].split()[0] == "relu"


def test_unit_parameters():
    params = {
        "w": jnp.array([3.0, -4.0], jnp.bfloat16),
        "bias": jnp.zeros(3),
        "gain": jnp.ones(3),
        "scalar": jnp.float32(0.1),
        "empty": jnp.zeros(0),
        "step": jnp.int32(3),
        "key": KEY,
        "name": None,
    }
    found = jax.jit(us.unit_parameters)(params)
    assert found["w"].dtype == jnp.bfloat16 and abs(rms(found["w"]) - 1) < 0.01
    for name in ("bias", "gain", "scalar", "empty", "step"):
        np.testing.assert_array_equal(found[name], params[name])
    assert found["key"] == KEY


def test_errors():
    with pytest.raises(TypeError, match="`fun` must be callable, got int"):
        us.unit_scale(3)
    with pytest.raises(ValueError, match="`constraint` must be None, one of"):
        us.unit_scale(loss, constraint="nothing")
    with pytest.raises(ValueError, match="does not fit an operation"):
        us.unit_scale(lambda x: (x, jnp.tanh(x)), constraint="to_left_grad_scale")(X)
    with pytest.raises(TypeError, match="plain arrays, got a ScaledArray"):
        us.unit_scale(jnp.tanh)(jsa.as_scaled_array(X))
