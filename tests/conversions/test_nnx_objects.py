"""NNX objects as arguments: what a function writes into them comes back, as under `nnx.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_scalify as jsa


class Net(nnx.Module):
    """A layer, a BatchNorm, dropout, and a head that shares the layer's weights."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.tied = self.embed

    def __call__(self, x):
        hidden = self.drop(self.norm(jnp.tanh(self.embed(x))))
        return hidden @ self.tied.kernel.T


def make_net():
    return Net(nnx.Rngs(0))


def make_batch():
    return jax.random.normal(jax.random.key(1), (16, 4))


def step(model, optimizer, x):
    def loss_fn(model):
        return jnp.mean(jnp.square(model(x) - x).astype(jnp.float32))

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def train(update, model, optimizer, steps=4):
    losses = [update(model, optimizer, make_batch()) for _ in range(steps)]
    return np.float32([jsa.asarray(x, jnp.float32) for x in losses])


def make_optimizer(model):
    return nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def make_float16():
    model = make_net()
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jsa.as_scaled_array(params, scale="rms", dtype="float16"))
    tx = jsa.optim.low_precision(optax.adam(1e-2), round_updates=True)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("outermost", ["nnx.jit", "scalify"])
def test_a_step_that_writes_is_the_plain_step(outermost):
    expected = make_net(), make_optimizer(make_net())
    given = make_net(), make_optimizer(make_net())
    both = nnx.jit(jsa.scalify(step)) if outermost == "nnx.jit" else jsa.scalify(nnx.jit(step))
    plain = train(nnx.jit(step), *expected)
    np.testing.assert_allclose(train(both, *given), plain, rtol=1e-6)
    assert plain[-1] < plain[0]
    for a, b in zip(jax.tree.leaves(nnx.state(given)), jax.tree.leaves(nnx.state(expected))):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert given[0].tied is given[0].embed


def test_float16_with_an_unmodified_step():
    plain = train(nnx.jit(step), make_net(), make_optimizer(make_net()))
    model, optimizer = make_float16()
    losses = train(nnx.jit(jsa.scalify(step)), model, optimizer)
    np.testing.assert_allclose(losses, plain, rtol=5e-3)
    kernel = model.embed.kernel.get_value()
    assert isinstance(kernel, jsa.ScaledArray) and kernel.dtype == jnp.float16
    moments = [x for x in jsa.tree.leaves(nnx.state(optimizer)) if isinstance(x, jsa.ScaledArray)]
    assert moments and all(m.dtype == jnp.float16 for m in moments)
    assert int(optimizer.step.get_value()) == 4
    assert float(jsa.asarray(model.norm.mean.get_value(), jnp.float32)[0]) != 0


def test_an_eager_call_writes():
    model = make_net()
    before = model.norm.mean.get_value()
    jsa.scalify(lambda model, x: model(x))(model, x=make_batch())
    assert not np.array_equal(model.norm.mean.get_value(), before)


def test_what_is_not_written_stays_the_same_array():
    model = make_net()
    kernel = model.embed.kernel.get_value()
    jsa.scalify(lambda x, model: model(x))(make_batch(), model=model)
    assert model.embed.kernel.get_value() is kernel


def test_a_variable_of_its_own():
    count = nnx.Variable(jnp.float32(1.0))

    def add(count, x):
        count[...] += x
        return count[...] * 2

    assert float(jsa.scalify(add)(count, 2.0)) == 6
    assert float(count[...]) == 3
    scaled = nnx.Variable(jsa.scaled_array(jnp.float32(1.0), 4.0))
    out = jsa.scalify(add)(scaled, 2.0)
    assert float(jsa.asarray(out)) == 12
    assert float(jsa.asarray(scaled.get_value())) == 6


def test_a_module_among_the_results():
    model = make_net()
    grads = jsa.scalify(lambda m, x: nnx.grad(lambda m: jnp.sum(m(x)))(m))(model, make_batch())
    expected = nnx.grad(lambda m: jnp.sum(m(make_batch())))(make_net())
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_change_of_the_structure_is_refused():
    def evaluate(model, x):
        model.eval()
        return model(x)

    with pytest.raises(ValueError, match=r"static attributes \(`model.eval\(\)` does\)"):
        jsa.scalify(evaluate)(make_net(), make_batch())


def test_states_are_ordinary_pytrees():
    graph, state = nnx.split(make_net())

    def apply(state, x):
        model = nnx.merge(graph, state)
        return model(x), nnx.state(model)

    before = jax.tree.leaves(state)
    _, new = jsa.scalify(apply)(state, make_batch())
    assert all(a is b for a, b in zip(before, jax.tree.leaves(state), strict=True))
    assert int(new.drop.rngs.count.get_value()) == 1


def test_fp8_matmuls_inside_of_the_gradient():
    def fp8_step(model, optimizer, x):
        loss_fn = jsa.fp8_matmuls(
            lambda m: jnp.mean(jnp.square(m(x) - x).astype(jnp.float32)), jsa.fp8.linear_layers
        )
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    plain = train(nnx.jit(step), make_net(), make_optimizer(make_net()))
    model, optimizer = make_float16()
    losses = train(nnx.jit(jsa.scalify(fp8_step)), model, optimizer)
    np.testing.assert_allclose(losses, plain, rtol=0.05)
    assert not np.allclose(losses, plain, rtol=1e-4)  # it is FP8
    assert int(model.drop.rngs.count.get_value()) == 4
    assert float(jsa.asarray(model.norm.mean.get_value(), jnp.float32)[0]) != 0


@pytest.mark.full
def test_numerics_of_a_step():
    model, optimizer = make_float16()
    seen = jsa.numerics.report(jsa.scalify(step))(model, optimizer, make_batch())
    assert {row.phase for row in seen.rows} == {"input", "forward", "backward", "update"}
    names = {row.name for row in seen.rows if row.phase == "update"}
    assert any("['embed']['kernel']" in name for name in names), names
    assert jsa.numerics.find_nonfinite(jsa.scalify(step))(model, optimizer, make_batch()) is None
    assert int(optimizer.step.get_value()) == 0  # nothing of that has been a step


@pytest.mark.sampled(16)
@pytest.mark.parametrize("select", [None, "tanh"])
def test_a_tracked_step_writes_at_every_call(select):
    expected = train(nnx.jit(jsa.scalify(step)), *make_float16())
    tracked = jsa.numerics.track(nnx.jit(jsa.scalify(step)), select, every=2)
    model, optimizer = make_float16()
    seen = [tracked(model, optimizer, make_batch()) for _ in range(4)]
    np.testing.assert_allclose([jsa.asarray(x, jnp.float32) for x, _ in seen], expected, rtol=1e-3)
    assert [record is not None for _, record in seen] == [False, True, False, True]
    assert seen[1][1].names


def test_check_fp8_of_a_step():
    def fp8_step(model, optimizer, x):
        loss_fn = jsa.fp8_matmuls(
            lambda m: jnp.mean(jnp.square(m(x) - x).astype(jnp.float32)), jsa.fp8.linear_layers
        )
        _, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)

    update = nnx.jit(jsa.scalify(fp8_step))
    checked = jsa.numerics.check_fp8(update, *make_float16(), make_batch(), compile=False)
    assert checked.summary.startswith("5 of 5 matmuls have FP8 operands"), checked.summary


@pytest.mark.parametrize(
    "convert",
    [
        lambda net: jsa.as_scaled_array(net, scale="rms", dtype="float16"),
        lambda net: jsa.asarray(jsa.as_scaled_array(net)),
        lambda net: jsa.freeze_scales(jsa.as_scaled_array(net)),
        lambda net: jsa.thaw_scales(jsa.freeze_scales(jsa.as_scaled_array(net))),
    ],
)
def test_conversions_of_a_module_keep_what_is_shared(convert):
    net = make_net()
    new = convert({"net": net, "rest": [jnp.ones(2), None]})["net"]
    assert isinstance(new, Net) and new is not net
    assert new.tied is new.embed
    value = jsa.asarray(new.embed.kernel.get_value(), jnp.float32)
    np.testing.assert_allclose(value, net.embed.kernel.get_value(), rtol=1e-3)


def test_a_converted_module_trains_as_the_plain_one():
    expected = train(nnx.jit(step), make_net(), make_optimizer(make_net()))
    model = jsa.as_scaled_array(make_net(), scale="rms")
    losses = train(nnx.jit(jsa.scalify(step)), model, make_optimizer(model))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("jit", [nnx.jit, lambda f: f])
def test_objects_among_the_results(jit):
    def both(model, x):
        model.norm.mean[...] += 1
        return model, {"new": Net(nnx.Rngs(1)), "out": model(x)}

    model = make_net()
    same, others = jit(jsa.scalify(both))(model, make_batch())
    assert same.tied is same.embed and others["new"].tied is others["new"].embed
    assert float(same.norm.mean[0]) == float(model.norm.mean[0]) != 0
    expected = Net(nnx.Rngs(1)).embed.kernel.get_value()
    np.testing.assert_array_equal(others["new"].embed.kernel.get_value(), expected)


def test_what_is_written_has_buffers_of_its_own():
    def write(model, mean):
        model.norm.mean[...] = mean
        return model.norm.mean[...], mean

    model, mean = make_net(), jsa.as_scaled_array(jnp.full_like(make_net().norm.mean[...], 2.0))
    results = jsa.scalify(write)(model, mean)
    leaves = jax.tree.leaves((model.norm.mean, results, mean))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_an_exception_leaves_the_module_unharmed():
    def fails(model, x):
        model.norm.mean[...] += 1
        raise RuntimeError("on the way")

    model = make_net()
    before = model.norm.mean.get_value()
    with pytest.raises(RuntimeError, match="on the way"):
        jsa.scalify(fails)(model, make_batch())
    assert model.norm.mean.get_value() is before


def make_metrics():
    return nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("stops", [True, False])
def test_metrics(stops):
    def evaluate(model, metrics, x):
        logits = model(x)
        loss = jnp.mean(jnp.square(logits - x).astype(jnp.float32))
        given = jsa.stop_scaling(loss), jsa.stop_scaling(logits)
        given = given if stops else (loss, logits)
        metrics.update(loss=given[0], logits=given[1], labels=jnp.argmax(x, axis=-1))
        return loss

    metrics, plain = make_metrics(), make_metrics()
    model, _ = make_float16()
    loss = nnx.jit(jsa.scalify(evaluate))(model, metrics, make_batch())
    nnx.jit(evaluate)(make_net(), plain, make_batch())
    if not stops:
        nnx.update(metrics, jsa.asarray(nnx.state(metrics)))
    assert float(metrics.compute()["loss"]) == pytest.approx(float(loss), rel=1e-6)
    assert float(metrics.compute()["accuracy"]) == float(plain.compute()["accuracy"])
    metrics.reset()
    assert float(metrics.loss.total[...]) == 0
