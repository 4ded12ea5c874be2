"""The modules of both of Flax's interfaces, and the decoder that they make."""

import functools
import math

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_scalify as jsa
from jax_scalify import unit_scaling as us
from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling import linen, nnx, optim
from jax_scalify.unit_scaling.factors import softmax_stds
from tests.unit_scaling.models import copy_into

VOCAB, WIDTH, HEADS, LAYERS = 32, 32, 2, 2
SIZES = dict(num_layers=LAYERS, num_heads=HEADS, hidden=48)
IDS, LABELS = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (2, 4, 16)))
CONFIG = us.UmupConfig(
    attn_softmax_mult=2.0,
    ffn_act_mult=0.5,
    residual_mult=0.75,
    residual_attn_ratio=1.5,
    loss_softmax_mult=1.25,
)


def rms(x):
    return float(jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))))


def linen_decoder(**options):
    module = linen.TransformerDecoder(VOCAB, WIDTH, **{**SIZES, **options})
    return module, jax.jit(module.init)(jax.random.key(0), IDS)["params"]


def nnx_decoder(**options):
    return nnx.TransformerDecoder(VOCAB, WIDTH, **{**SIZES, **options}, rngs=flax.nnx.Rngs(0))


def loss_and_params(interface, **options):
    """A loss as a function of parameters, and the parameters."""
    if interface == "linen":
        module, params = linen_decoder(**options)
        return (lambda p: module.apply({"params": p}, IDS, LABELS, method="loss")), params
    graph, params = flax.nnx.split(nnx_decoder(**options))
    return (lambda p: flax.nnx.merge(graph, p).loss(IDS, LABELS)), params


def test_both_interfaces_give_the_same():
    module, params = linen_decoder(config=CONFIG, fp8=True)
    model = nnx_decoder(config=CONFIG, fp8=True)
    copy_into(model, params)
    got, want = flax.nnx.jit(model)(IDS), jax.jit(module.apply)({"params": params}, IDS)
    np.testing.assert_allclose(got, want, atol=1e-3)  # a number between two of E4M3 goes to either
    graph, state = flax.nnx.split(model)
    assert dots(lambda s: flax.nnx.merge(graph, s)(IDS), state) == dots(
        lambda p: module.apply({"params": p}, IDS), params
    )


def test_layers_of_both_interfaces_give_the_same():
    x = jax.random.normal(jax.random.key(0), (3, 8))
    rngs = flax.nnx.Rngs(0)
    pairs = [
        (nnx.Linear(8, 4, use_bias=True, rngs=rngs), linen.Linear(4, use_bias=True)),
        (nnx.LinearReadout(8, 4, use_bias=True, rngs=rngs), linen.LinearReadout(4, use_bias=True)),
        (
            nnx.LayerNorm(8, use_scale=True, use_bias=True),
            linen.LayerNorm(use_scale=True, use_bias=True),
        ),
        (nnx.RMSNorm(8, use_scale=True, depth=3), linen.RMSNorm(use_scale=True, depth=3)),
    ]
    for ours, module in pairs:
        state = flax.nnx.state(ours, flax.nnx.Param)
        params = flax.nnx.to_pure_dict(state)
        params = jax.tree.map(lambda p: p + 0.5, params)
        flax.nnx.replace_by_pure_dict(state, params)
        flax.nnx.update(ours, state)
        init = module.init(jax.random.key(0), x)["params"]
        assert us.get_roles(init) == flax.nnx.to_pure_dict(us.get_roles(state))
        np.testing.assert_array_equal(ours(x), module.apply({"params": params}, x))


def test_decoder_is_a_plain_llama_with_the_multipliers_of_mup():
    """The stream's scale is free, as a norm ends it: lemma F.1 for the whole model."""
    module, boxed = linen_decoder(config=CONFIG)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), flax.linen.meta.unbox(boxed))

        def norm(x):
            return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))

        def dense(x, layer):
            return x @ layer["kernel"] / math.sqrt(x.shape[-1])

        def attention(x, p):
            heads = (*x.shape[:-1], HEADS, -1)
            q, k, v = (dense(x, p[name]).reshape(heads) for name in ("query", "key", "value"))
            d = q.shape[-1]
            scores = jnp.einsum("btnh,bsnh->bnts", F.rope(q), F.rope(k)) * 2.0 / d
            scores = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), scores, -jnp.inf)
            out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v).reshape(x.shape)
            return dense(out / softmax_stds(16, 2.0 / math.sqrt(d), True)[0], p["out"])

        def mlp(x, p):
            up, gate = dense(x, p["up"]), dense(x, p["gate"])
            factor = math.exp(math.log(0.5) * 0.8 + math.log(math.sqrt(0.5)) * 0.2)
            return dense(up * gate * jax.nn.sigmoid(0.5 * gate) / factor, p["down"])

        alpha_mlp = 0.75 * math.sqrt(2 / (1 + 1.5**2))
        alphas = [1.5 * alpha_mlp, alpha_mlp]

        @jax.jit
        def plain(params):
            x = params["embed"]["embedding"][IDS]
            for i in range(LAYERS):
                layer = params[f"layers_{i}"]
                for alpha, f, name in zip(alphas, (attention, mlp), ("attention", "mlp")):
                    x = x + alpha / math.sqrt(LAYERS) * f(norm(x), layer[name])
            return norm(x) @ params["readout"]["kernel"] / WIDTH

        logits = plain(params)
        got = jax.jit(module.apply)({"params": params}, IDS)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, logits, atol=2e-5)  # the norms' epsilon
        log_p = jax.nn.log_softmax(1.25 * logits)
        loss = -jnp.mean(jnp.take_along_axis(log_p, LABELS[..., None], -1))
        apply = jax.jit(functools.partial(module.apply, method="loss"))
        got = apply({"params": params}, IDS, LABELS)
        np.testing.assert_allclose(got, loss, atol=2e-5)


def test_exactly_the_critical_matmuls_stay_in_the_wider_dtype():
    """Those whose inputs grow in training, and the readout, whose weight does."""
    modules = dict(flax.nnx.iter_modules(nnx_decoder(fp8=True)))
    narrow = {path[-1]: m.fp8 for path, m in modules.items() if type(m) is nnx.Linear}
    assert {name for name, fp8 in narrow.items() if not fp8} == {"out", "down"}
    assert set(narrow) == {"query", "key", "value", "out", "up", "gate", "down"}
    assert not modules["readout",].fp8


@pytest.mark.sampled(16)
@pytest.mark.parametrize("fp8", [False, True])
def test_at_initialisation_all_has_unit_scale(fp8):
    """Exempt are logits, whose size is 1/√width in u-µP, and the gradients of queries and keys.

    Those share the factor of values, as their paths meet, and a softmax that is nearly uniform
    passes little back.
    """
    module, params = linen_decoder(fp8=fp8)

    def loss(params):
        variables = {"params": params}
        logits, state = module.apply(
            variables, IDS, capture_intermediates=True, mutable=["intermediates"]
        )
        return F.cross_entropy(logits, LABELS), (logits, state["intermediates"])

    grads, (logits, values) = jax.jit(jax.grad(loss, has_aux=True))(params)
    values = jax.tree.leaves_with_path(values)
    assert len(values) > 20
    for path, value in values:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if "readout" not in name and name != "__call__/0":
            assert 0.5 < rms(value) < 2, (name, rms(value))
    assert rms(logits) == pytest.approx(1 / math.sqrt(WIDTH), rel=0.2)
    for path, grad in jax.tree.leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        low = 0.05 if "query" in name or "key/" in name else 0.5
        assert low < rms(grad) < 2, (name, rms(grad))


def test_gradients_of_the_stream_have_unit_scale():
    graph, params = flax.nnx.split(nnx_decoder())

    @jax.jit
    def gradients(params):
        model = flax.nnx.merge(graph, params)

        def loss(probes):
            x = model.embed(IDS) + probes[0]
            for layer, probe in zip(model.layers, probes[1:]):
                x = layer(x) + probe
            return F.cross_entropy(model.readout(model.norm(x)), LABELS)

        return jax.grad(loss)(jnp.zeros((LAYERS + 1, *IDS.shape, WIDTH)))

    for depth, grad in enumerate(gradients(params)):
        assert 0.5 < rms(grad) < 2, depth


@pytest.mark.sampled(16)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("interface", ["nnx", "linen"])
def test_a_decoder_learns(interface, fp8):
    loss, params = loss_and_params(interface, fp8=fp8)
    tx = optim.adamw(2.0**-2, weight_decay=2.0**-13)

    @jax.jit
    def run(params):
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, tx.init(params)), length=15)[1]

    values = run(params)
    assert values[0] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert values[-1] < 0.7 * values[0], values


@pytest.mark.sampled(16)
@pytest.mark.parametrize("interface, fp8", [("nnx", True), ("linen", False)])
def test_a_training_step_composes_with_scalify(interface, fp8):
    loss, params = loss_and_params(interface, fp8=fp8, num_layers=1)
    tx = optim.sgd(2.0**-2, 0.5) if fp8 else optim.adamw(2.0**-2, weight_decay=2.0**-13)

    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = tx.init(params)
    plain = jax.jit(step)(params, state)
    scaled = jax.jit(jsa.scalify(step))(*jsa.as_scaled_array((params, state)))
    scaled = jsa.asarray(scaled)
    assert jax.tree.structure(scaled) == jax.tree.structure(plain)
    np.testing.assert_allclose(scaled[2], plain[2], rtol=1e-3 if fp8 else 1e-6)
    moved = [jnp.abs(a - b) for a, b in zip(*map(jax.tree.leaves, (plain[0], params)))]
    for mine, theirs, step in zip(*map(jax.tree.leaves, (scaled[0], plain[0])), moved):
        # Adam's first step is the gradient's sign: where that is rounding, either will do.
        off = jnp.abs(mine - theirs) > 0.01 * step
        assert jnp.mean(off) < (0.1 if fp8 else 0.01)


def dots(fun, *args):
    """Dtypes of the operands of all matmuls of a traced function."""
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found.append(tuple(str(v.aval.dtype) for v in eqn.invars))
            for value in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                if hasattr(value, "eqns"):
                    visit(value.jaxpr if hasattr(value, "jaxpr") else value)

    visit(jax.make_jaxpr(fun)(*args).jaxpr)
    return found


def test_matmuls_that_are_not_critical_are_in_fp8():
    loss, params = loss_and_params("linen", fp8=True, dtype=jnp.bfloat16)
    found = dots(jax.grad(loss), params)
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    # Of each layer query, key, value, up and gate; and two gradients of each.
    assert found.count((e4m3, e4m3)) == 5 * LAYERS
    assert found.count((e5m2, e4m3)) + found.count((e4m3, e5m2)) == 2 * 5 * LAYERS
    rest = [pair for pair in found if not any("float8" in dtype for dtype in pair)]
    # Of each layer out and down and the two of attention, and the readout; forward and backward.
    assert len(rest) == 3 * (4 * LAYERS + 1)
    loss, params = loss_and_params("linen")
    assert not any("float8" in dtype for pair in dots(jax.grad(loss), params) for dtype in pair)


def test_fp8_matmul_rounds_operands_and_cotangent_and_no_more():
    rng = np.random.default_rng(0)
    x, w, ct = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 3, 64), (64, 8), (2, 3, 8))
    )
    x = x.at[0, 0, 0].set(1e6)  # saturates

    def rounded(x, dtype):
        bound = float(jnp.finfo(dtype).max)
        return np.asarray(jnp.clip(x, -bound, bound).astype(dtype).astype(jnp.float32), np.float64)

    out, pull = jax.vjp(us.fp8_matmul, x, w)
    dx, dw = pull(ct)
    xr, wr = rounded(x, jnp.float8_e4m3fn), rounded(w, jnp.float8_e4m3fn)
    ctr = rounded(ct, jnp.float8_e5m2)
    np.testing.assert_allclose(out, xr @ wr, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dx, ctr @ wr.T, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dw, np.einsum("abk,abn->kn", xr, ctr), rtol=1e-5, atol=1e-4)
    # In a linear layer operands and cotangent reach the casts with unit scale.
    got = F.linear(x, w, None, None, matmul=us.fp8_matmul)
    np.testing.assert_array_equal(got, out * jnp.float32(1 / 8))
    got = jax.vjp(functools.partial(F.linear, constraint=None, matmul=us.fp8_matmul), x, w)[1](ct)
    np.testing.assert_allclose(got[0], dx / math.sqrt(8), rtol=1e-6)
    np.testing.assert_allclose(got[1], dw / math.sqrt(6), rtol=1e-6)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("interface", ["nnx", "linen"])
def test_dtypes_of_parameters_and_computation(interface):
    options = dict(dtype=jnp.bfloat16, param_dtype=jnp.float16)
    loss, params = loss_and_params(interface, **options)
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype(jnp.float16)}
    value, grads = jax.eval_shape(jax.value_and_grad(loss), params)
    assert value.dtype == jnp.float32
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float16)}
    found = dots(loss, params)
    assert {pair for pair in found} == {("bfloat16", "bfloat16")}


def test_a_scheme_and_the_labels_that_count():
    module, params = linen_decoder(residuals=us.fixed_tau(0.25))
    assert module.bind({"params": params}).layers[1].taus == (math.sqrt(1 / 3),) * 2
    where = jnp.arange(16) < 3
    apply = jax.jit(module.apply, static_argnames="method")
    got = apply({"params": params}, IDS, LABELS, where, method="loss")
    log_p = jax.nn.log_softmax(apply({"params": params}, IDS))
    losses = -jnp.take_along_axis(log_p, LABELS[..., None], -1)[..., 0]
    np.testing.assert_allclose(got, jnp.mean(losses[:, :3]), rtol=1e-5)


def test_attention_sees_what_it_may():
    x = jax.random.normal(jax.random.key(0), (1, 6, 8))
    moved = x.at[0, 4].add(1.0)
    for is_causal in (True, False):
        layer = nnx.MHSA(8, 2, is_causal=is_causal, rngs=flax.nnx.Rngs(0))
        same = jnp.all(layer(x) == layer(moved), axis=-1)[0]
        np.testing.assert_array_equal(same[:4], is_causal)
        assert not same[4:].any()


@pytest.mark.parametrize("width, heads", [(8, 3), (6, 2), (8, 0)])
def test_heads_that_do_not_fit_are_refused(width, heads):
    with pytest.raises(ValueError, match="`num_heads` must divide"):
        nnx.MHSA(width, heads, rngs=flax.nnx.Rngs(0))
    with pytest.raises(ValueError, match="`num_heads` must divide"):
        linen.MHSA(heads).init(jax.random.key(0), jnp.ones((1, 2, width)))
