"""Options of the modules: heads, windows, norms, dropout, tied tables, layers in a scan."""

import functools

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import unit_scaling as us
from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling import linen, nnx
from tests.unit_scaling.models import copy_into
from tests.unit_scaling.test_umup_modules import rms

VOCAB, WIDTH = 16, 16
IDS, LABELS = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (2, 4, 8)))
ATTENTION = dict(num_kv_heads=1, window=3, qk_norm=True)
SCANNED = dict(scan_layers=True, remat=True)
EXPERTS = dict(num_experts=3)


def decoder(module, **options):
    options = dict(num_layers=2, num_heads=2, hidden=24) | options
    if module is nnx:
        return nnx.TransformerDecoder(VOCAB, WIDTH, **options, rngs=flax.nnx.Rngs(0))
    return linen.TransformerDecoder(VOCAB, WIDTH, **options)


def loss_and_params(**options):
    graph, params = flax.nnx.split(decoder(nnx, **options))
    return (lambda p: flax.nnx.merge(graph, p).loss(IDS, LABELS)), params


full = functools.partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "options, with_gradients",
    [
        (ATTENTION | SCANNED | dict(tie_embeddings=True), False),
        full(ATTENTION | SCANNED | dict(tie_embeddings=True), True),
        full(EXPERTS | SCANNED, True),
        full(EXPERTS | dict(experts_per_token=1, remat=True), True),
        full(ATTENTION, True),
        full(dict(tie_embeddings=True), True),
        full(dict(scan_layers=True, remat=jax.checkpoint_policies.dots_saveable), True),
        full(dict(remat=True), True),
    ],
)
def test_both_interfaces_give_the_same(options, with_gradients):
    module, model = decoder(linen, **options), decoder(nnx, **options)
    params = jax.jit(module.init)(jax.random.key(0), IDS)["params"]
    roles = us.get_roles(flax.nnx.state(model, flax.nnx.Param))
    assert flax.nnx.to_pure_dict(roles) == named_as_nnx(us.get_roles(params))
    copy_into(model, params)
    graph, state = flax.nnx.split(model)
    loss = functools.partial(module.apply, method="loss")
    both = (
        (lambda s: flax.nnx.merge(graph, s).loss(IDS, LABELS)),
        lambda p: loss({"params": p}, IDS, LABELS),
    )
    got, want = (jax.jit(f)(p) for f, p in zip(both, (state, params)))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    if with_gradients:
        got, want = (jax.jit(jax.grad(f))(p) for f, p in zip(both, (state, params)))
        want = named_as_nnx(flax.linen.meta.unbox(want))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
            flax.nnx.to_pure_dict(got),
            want,
        )


def named_as_nnx(params):
    """Layers by their numbers, as lists of NNX have them."""
    numbered = {int(n[7:]): p for n, p in params.items() if n.startswith("layers_")}
    rest = {n: p for n, p in params.items() if not n.startswith("layers_")}
    return rest | ({"layers": numbered} if numbered else {})


def test_layers_in_a_scan_are_those_outside_of_one():
    """For one seed, with the same parameters, gradients and values; compiled once for all."""
    loss, params = loss_and_params()
    scanned_loss, scanned = loss_and_params(**SCANNED)
    layers = list(flax.nnx.to_pure_dict(params)["layers"].values())
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    jax.tree.map(np.testing.assert_array_equal, flax.nnx.to_pure_dict(scanned)["layers"], stacked)
    assert us.get_roles(scanned)["layers"]["mlp"]["up"]["kernel"] == us.Role("weight", WIDTH, 2)
    want, grads = jax.jit(jax.value_and_grad(loss))(params)
    got, scanned_grads = jax.jit(jax.value_and_grad(scanned_loss))(scanned)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    grads, scanned_grads = map(flax.nnx.to_pure_dict, (grads, scanned_grads))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads["layers"].values())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), scanned_grads["layers"], stacked
    )
    np.testing.assert_allclose(
        scanned_grads["embed"]["embedding"], grads["embed"]["embedding"], atol=1e-4
    )

    def equations(layers):
        f, p = loss_and_params(num_layers=layers, scan_layers=True)
        return str(jax.make_jaxpr(f)(p)).count("dot_general")

    assert equations(1) == equations(3)


def test_a_decoder_with_experts_adds_up_their_losses_for_balance():
    losses = [loss_and_params(**EXPERTS, balance_mult=mult) for mult in (1.0, 0.0)]
    (loss, params), (without, _) = losses
    layers = flax.nnx.to_pure_dict(params)["layers"]
    assert layers[0]["mlp"]["up"].shape == (3, WIDTH, 24)
    balance = jax.jit(loss)(params) - jax.jit(without)(params)
    assert 2 <= balance < 3  # of two layers, 1 each if all experts get as many
    with pytest.raises(ValueError, match="`k` must be in .* got 4 of 3"):
        decoder(nnx, **EXPERTS, experts_per_token=4)


@pytest.mark.full
def test_a_scan_composes_with_scalify():
    loss, params = loss_and_params(**SCANNED, **ATTENTION)
    plain = jax.jit(jax.grad(loss))(params)
    scaled = jsa.asarray(jax.jit(jsa.scalify(jax.grad(loss)))(jsa.as_scaled_array(params)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), scaled, plain)


@pytest.mark.parametrize("groups", [1, full(4)])
def test_grouped_queries_have_unit_scale_and_the_right_gradient(groups):
    """In both passes, of all layers; and the gradient of the input, up to one constant."""
    width, heads = 64, 8
    model = nnx.MHSA(width, heads, num_kv_heads=groups, is_causal=False, rngs=flax.nnx.Rngs(0))
    assert model.key.kernel.shape == (width, groups * width // heads)
    graph, params = flax.nnx.split(model)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: p.astype(jnp.float64), params)
        x, ct, *ways = jax.random.normal(jax.random.key(0), (4, 8, 16, width))

        @jax.jit
        def run(params, x):
            out, pull = jax.vjp(lambda p, x: flax.nnx.merge(graph, p)(x), params, x)
            return out, *pull(ct)

        out, grads, grad = run(params, x)
        assert rms(out) == pytest.approx(1, rel=0.25)
        for name in ("value", "out"):
            assert rms(grads[name]["kernel"][...]) == pytest.approx(1, rel=0.25), name
        steps = [1e-5 * way for way in ways]
        changes = [jnp.vdot(ct, run(params, x + s)[0] - run(params, x - s)[0]) / 2 for s in steps]
        ratios = [jnp.vdot(grad, s) / change for s, change in zip(steps, changes)]
        np.testing.assert_allclose(ratios[0], ratios[1], rtol=1e-6)


def test_norms_of_queries_and_keys():
    model = nnx.MHSA(16, 2, qk_norm=True, depth=3, rngs=flax.nnx.Rngs(0))
    assert model.query_norm.scale.role == us.Role("norm", 8, 3)
    run = flax.nnx.jit(lambda model, x: model(x))
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    before = run(model, x)
    for layer in (model.query, model.key):
        layer.kernel[...] *= 7.0
    np.testing.assert_allclose(run(model, x), before, atol=1e-4)


@pytest.mark.parametrize("layers", [0, full(1)])
def test_a_tied_table_has_the_right_gradient(layers):
    """Of both its uses together, up to one constant, and of unit scale."""
    graph, params = flax.nnx.split(decoder(nnx, tie_embeddings=True, num_layers=layers))
    assert "readout" not in params
    assert params["embed"]["embedding"].role == us.Role("output", WIDTH)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: p.astype(jnp.float64), params)
        table = params["embed"]["embedding"][...]

        @jax.jit
        @jax.value_and_grad
        def run(table):
            embed = {"embedding": flax.nnx.Param(table)}
            state = flax.nnx.State({**params, "embed": embed})
            return flax.nnx.merge(graph, state).loss(ids, LABELS)

        ids = IDS % (VOCAB // 2)
        _, grad = run(table)
        assert rms(grad) == pytest.approx(1, rel=0.35)
        # A direction of rows that are read out only, and one of rows that are looked up too.
        way = 1e-5 * jax.random.normal(jax.random.key(0), table.shape)
        ways = [way.at[: VOCAB // 2].set(0), way.at[VOCAB // 2 :].set(0)]
        changes = [(run(table + w)[0] - run(table - w)[0]) / 2 for w in ways]
        ratios = [jnp.vdot(grad, w) / change for w, change in zip(ways, changes)]
        np.testing.assert_allclose(ratios[0], ratios[1], rtol=1e-5)


def test_dropout_has_unit_scale_and_is_left_out_of_evaluation():
    x = jax.random.normal(jax.random.key(0), (256, 64))
    ours = nnx.Dropout(0.4, rngs=flax.nnx.Rngs(0))
    first, second = ours(x), ours(x)
    assert rms(first) == pytest.approx(1, rel=0.05) and (first != second).any()
    ours.eval()
    np.testing.assert_array_equal(ours(x), F.dropout(x, 0.4, deterministic=True))
    key = jax.random.key(3)
    np.testing.assert_array_equal(ours(x, deterministic=False, rngs=key), F.dropout(x, 0.4, key))
    module = linen.Dropout(0.4)
    assert rms(module.apply({}, x, rngs={"dropout": key})) == pytest.approx(1, rel=0.05)
    np.testing.assert_array_equal(module.apply({}, x, deterministic=True), ours(x))


@pytest.mark.parametrize("options", [SCANNED, full({}), full(dict(remat=True))])
def test_dropout_in_a_decoder(options):
    model = decoder(nnx, dropout_rate=0.3, **options)
    run = flax.nnx.jit(lambda model: model(IDS))
    assert (run(model) != run(model)).any()  # keys go on
    if "scan_layers" in options:
        np.testing.assert_array_equal(model.layers.dropout.rngs.count[...], [4, 4])
    model.eval()
    np.testing.assert_array_equal(run(model), run(model))


@pytest.mark.parametrize("options", [full(SCANNED), full({}), full(dict(remat=True))])
def test_dropout_in_a_decoder_of_linen(options):
    module = decoder(linen, dropout_rate=0.3, **options)
    variables = jax.jit(functools.partial(module.init, deterministic=True))(jax.random.key(0), IDS)
    apply = jax.jit(module.apply, static_argnames="deterministic")
    dropped = [apply(variables, IDS, rngs={"dropout": jax.random.key(i)}) for i in (0, 0, 1)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert (dropped[0] != dropped[2]).any()
    model = decoder(nnx, dropout_rate=0.3, **options)
    copy_into(model, variables["params"])
    model.eval()
    evaluated = apply(variables, IDS, deterministic=True)
    np.testing.assert_allclose(evaluated, flax.nnx.jit(model)(IDS), atol=1e-5)


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(num_kv_heads=3), "`num_kv_heads` must divide the 2 heads of queries, got 3"),
        (dict(num_kv_heads=0), "`num_kv_heads` must divide"),
        (dict(num_layers=0, scan_layers=True), "`scan_layers` needs one layer or more"),
        (dict(dropout_rate=1.0), r"`rate` of `Dropout` must be in \[0, 1\), got 1.0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        decoder(nnx, **options)
    with pytest.raises(ValueError, match=match):
        decoder(linen, **options).init(jax.random.key(0), IDS)
