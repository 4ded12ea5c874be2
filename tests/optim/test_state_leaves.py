"""What the state of an optimizer is, as found in its equations; and facts through control flow."""

import jax
import jax.numpy as jnp
import pytest

from jax_scalify.interpreter.facts import nonnegative_results
from jax_scalify.optim.degrees import degrees_of_results
from jax_scalify.optim.state_leaves import Role, RoleFinder

optax = pytest.importorskip("optax")

PARAMS = {"b": jnp.zeros(3), "layers": [{"b": jnp.zeros(4)}, {"w": jnp.ones((4, 3))}]}
SIGNED, SQUARE = Role(False, 1), Role(True, 2)
UNKNOWN = Role(False, None)
ADAM = {"mu": SIGNED, "nu": SQUARE}

# Role of the fields of the state; of all their leaves.
OPTIMIZERS = {
    "momentum": (lambda: optax.sgd(0.1, momentum=0.9), {"trace": SIGNED}),
    "adam": (lambda: optax.adam(0.1), ADAM),
    "adamw": (lambda: optax.adamw(0.1, nesterov=True), ADAM),
    "lamb": (lambda: optax.lamb(0.1), ADAM),
    "nadam": (lambda: optax.nadam(0.1), ADAM),
    "radam": (lambda: optax.radam(0.1), ADAM),
    "adabelief": (lambda: optax.adabelief(0.1), ADAM),
    "adan": (lambda: optax.adan(0.1), {"m": SIGNED, "v": SIGNED, "n": SQUARE, "g": SIGNED}),
    "amsgrad": (lambda: optax.amsgrad(0.1), {**ADAM, "nu_max": SQUARE}),
    "adamax": (lambda: optax.adamax(0.1), {"mu": SIGNED, "nu": Role(True, 1)}),
    "rmsprop": (lambda: optax.rmsprop(0.1), {"nu": SQUARE}),
    "centered_rmsprop": (
        lambda: optax.rmsprop(0.1, centered=True),
        {"mu": SIGNED, "nu": SQUARE},
    ),
    "adagrad": (lambda: optax.adagrad(0.1), {"sum_of_squares": SQUARE}),
    "adadelta": (lambda: optax.adadelta(0.1), {"e_g": SQUARE, "e_x": Role(True, 0)}),
    "yogi": (lambda: optax.yogi(0.1), {"mu": SIGNED, "nu": Role(False, 2)}),
    "lion": (lambda: optax.lion(0.1), {"mu": SIGNED}),
    "rprop": (lambda: optax.rprop(0.1), {"step_sizes": Role(True, None)}),
    "adopt": (lambda: optax.contrib.adopt(0.1), {"mu": SIGNED, "nu": Role(False, 2)}),
    "ademamix": (lambda: optax.contrib.ademamix(0.1), {"m1": SIGNED, "m2": SIGNED, "nu": SQUARE}),
    "schedule_free": (lambda: optax.contrib.schedule_free_adamw(0.1), {"nu": SQUARE, "z": UNKNOWN}),
    "prodigy": (
        lambda: optax.contrib.prodigy(),
        {"exp_avg": SIGNED, "exp_avg_sq": Role(False, 2), "grad_sum": SIGNED, "params0": UNKNOWN},
    ),
    "muon": (lambda: optax.contrib.muon(0.1), ADAM),
    "lookahead-like": (
        lambda: optax.chain(optax.ema(0.9), optax.scale(-0.1)),
        {"ema": SIGNED},
    ),
    "masked": (lambda: optax.masked(optax.adam(0.1), lambda p: jax.tree.map(jnp.ndim, p)), ADAM),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(optax.adam)(0.1, b2=optax.constant_schedule(0.9)),
        {"mu": SIGNED, "nu": Role(False, 2)},
    ),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.adam(0.1), 3), ADAM),
    "multi_steps": (
        lambda: optax.MultiSteps(
            optax.adam(0.1), 4, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation(),
        {**ADAM, "acc_grads": SIGNED},
    ),
}


def find(opt, params):
    state = opt.init(params)
    roles = RoleFinder(opt.init, opt.update)(params, state, params, {})
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return list(zip(paths, roles, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_roles(name):
    make, fields = OPTIMIZERS[name]
    owners = [path for path, _ in jax.tree_util.tree_leaves_with_path(PARAMS)]
    found = set()
    for path, role in find(make(), PARAMS):
        field = next((k.name for k in path if getattr(k, "name", None) in fields), None)
        if field is None or role.param is None:
            continue
        found.add(field)
        assert role.nonneg == fields[field].nonneg, (path, role)
        assert role.degree == fields[field].degree, (path, role)
        own = owners[role.param]
        assert path[-len(own) :] == own
        assert role.param == max(
            (i for i, p in enumerate(owners) if path[-len(p) :] == p), key=lambda i: len(owners[i])
        )
    assert found == set(fields)


def test_factored_second_moments():
    params = {"w": jnp.ones((256, 128))}
    opt = optax.adafactor(0.1)
    wide = {path[1].name: role for path, role in find(opt, params) if len(path) > 2}
    assert wide["v_row"].is_wide and wide["v_col"].is_wide


def test_a_structure_is_looked_at_once():
    calls = []
    opt = optax.adam(0.1)

    def update(*args, **kwargs):
        calls.append(0)
        return opt.update(*args, **kwargs)

    finder, state = RoleFinder(opt.init, update), opt.init(PARAMS)
    for _ in range(3):
        finder(PARAMS, state, PARAMS, {})
    assert len(calls) == 1


def jaxpr(function, *args):
    return jax.make_jaxpr(function)(*args).jaxpr


X = jnp.ones(3)


def test_nonnegative_through_control_flow():
    def branches(c, x, y):
        return jax.lax.cond(c, lambda: (x, x), lambda: (x * x, y))

    assert nonnegative_results(jaxpr(branches, True, X, X), [False, True, False]) == [True, False]

    def loop(x, y):
        def body(i, carry):
            a, b, c = carry
            return a + x * x, b + c, c - 1.0

        return jax.lax.fori_loop(0, 3, body, (x, y, y))

    def scan(x, ys):
        def body(carry, y):
            a, b = carry
            return (a + y * y, a - y), (jnp.abs(y), y)

        (a, b), (c, d) = jax.lax.scan(body, (x, x), ys)
        return a, b, c, d

    assert nonnegative_results(jaxpr(loop, X, X), [True, True]) == [True, False, False]
    got = nonnegative_results(jaxpr(scan, X, jnp.ones((4, 3))), [True, False])
    assert got == [True, False, True, False]
    remat = jax.checkpoint(lambda x: jnp.exp(x) * 2.0)
    assert nonnegative_results(jaxpr(remat, X), [False]) == [True]


def test_while_loops_of_values():
    def function(x, y):
        return jax.lax.while_loop(lambda c: c[0].sum() < 9, lambda c: (c[0] + y, y), (x, y))

    assert nonnegative_results(jaxpr(function, X, X), [True, True]) == [True, True]
    assert nonnegative_results(jaxpr(function, X, X), [True, False]) == [False, False]


@pytest.mark.parametrize(
    ("function", "degree"),
    [
        (lambda g, p: 3.0 * g, 1),
        (lambda g, p: g + 1e-8, 1),
        (lambda g, p: p * g, 1),
        (lambda g, p: g * g / (jnp.sqrt(g**2) + 1.0), 1),
        (lambda g, p: g**4, 4),
        (lambda g, p: jax.lax.rsqrt(g), -0.5),
        (lambda g, p: 1.0 / g, -1),
        (lambda g, p: p, None),
        (lambda g, p: jnp.exp(g), None),
        (lambda g, p: jnp.sign(g) * p, 0),
        (lambda g, p: g / jnp.linalg.norm(g), 1),  # a scalar says nothing
        (lambda g, p: jnp.outer(g, g) @ g, 3),
        (lambda g, p: jax.lax.cond(p[0] > 0, lambda: g, lambda: p), 1),
        (lambda g, p: jax.lax.fori_loop(0, 3, lambda i, x: x + g, p), 1),
        (lambda g, p: jax.lax.fori_loop(0, 3, lambda i, x: x * g, p), None),
        (lambda g, p: jax.jit(jnp.where)(p > 0, g, 0.0), 1),
    ],
)
def test_degrees(function, degree):
    assert degrees_of_results(jaxpr(function, X, X), [1, None]) == [degree]
