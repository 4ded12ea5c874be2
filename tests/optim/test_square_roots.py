"""Second moments in FP8, stored by their square roots: means, ends of the range, zero gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_scalify as jsa
from jax_scalify.base.stochastic_rounding import round_stochastically
from jax_scalify.optim.square_roots import moved_for_square

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
low = jsa.optim.low_precision


def numbers(dtype):
    """All finite numbers of a dtype from 0 up."""
    every = np.arange(128, dtype=np.uint8).view(dtype).astype(np.float64)
    return every[np.isfinite(every)]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_square_keeps_its_mean(dtype):
    rng, known = np.random.default_rng(0), numbers(dtype)
    x = np.concatenate([known[:-1] + np.diff(known) * rng.random(known.size - 1), known])
    x = np.float32(x[x > 0])
    moved = np.asarray(jax.jit(lambda x: moved_for_square(x, dtype))(x), np.float64)
    above = np.searchsorted(known, moved, side="right").clip(max=known.size - 1)
    lower, upper = known[above - 1], known[above]
    share = (moved - lower) / (upper - lower)
    mean = (1 - share) * lower**2 + share * upper**2
    inside = x < known[-1]
    np.testing.assert_allclose(mean[inside], np.float64(x[inside]) ** 2, 2e-6)
    assert moved[-1] == known[-1]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_numbers_of_the_dtype_stay(dtype):
    x = np.float32(numbers(dtype))

    @jax.jit
    def store_again(x, bits):
        return round_stochastically(moved_for_square(jnp.sqrt(x * x), dtype), bits, dtype)

    for bits in (0, 2**31, 2**32 - 1):
        again = store_again(x, jnp.full(x.shape, bits, jnp.uint32))
        np.testing.assert_array_equal(np.float32(again), x)
    assert jnp.isnan(moved_for_square(jnp.float32([jnp.nan]), dtype)).all()


def moments(state):
    """The moments of Adam in a state, in float64."""
    mu, nu = state[0].mu, state[0].nu
    if isinstance(mu, dict):
        mu, nu = mu["w"], nu["w"]
    roots = jnp.square(jsa.asarray(nu.root, jnp.float32))
    return np.float64(jsa.asarray(mu, jnp.float32)), np.float64(roots)


def test_what_is_far_below_the_largest_element_does_not_explode():
    """Gradients from 2**-44 to 1, for 50 steps: no update is twice that of float32."""
    sizes = np.float32(2.0 ** -np.arange(0, 48, 4))
    params = jnp.zeros((sizes.size, 64))
    plain = optax.adam(1.0, eps=1e-30)
    opt = low(plain, first_moment_dtype=E4M3, second_moment_dtype=E4M3)

    def run(opt):
        def body(state, step):
            noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), params.shape)
            updates, state = opt.update(noise * sizes[:, None], state, params)
            return state, jnp.abs(updates).max(1)

        return jax.lax.scan(body, opt.init(params), jnp.arange(50))

    (state, ours), (_, wanted) = jax.jit(lambda: (run(opt), run(plain)))()
    _, nu = moments(state)
    assert np.isfinite(ours).all() and (nu > 0).all()
    # The first step's is float32's, and of what keeps its digits all are near. At the lower end,
    # 2**-16 of the largest, there is one bit; what is below makes steps that are too small.
    np.testing.assert_array_equal(ours[0], wanted[0])
    np.testing.assert_allclose(ours[:, :3], wanted[:, :3], 0.5)
    assert (ours.max(0) < 2 * wanted.max(0)).all() and (ours[:, 6:] <= 1).all()


@pytest.mark.parametrize("at", [1e-14, 1.0, 1e15])
def test_zeros_and_the_first_steps(at):
    """Of zeros the moments are zero and so are updates; a first gradient makes a step of 1."""
    params = jnp.zeros(4)
    opt = low(optax.adam(1.0, eps=0.0), first_moment_dtype=E4M3, second_moment_dtype=E4M3)
    update = jax.jit(opt.update)
    grads = jnp.float32([at, -at, at / 512, 0.0])
    updates, state = update(grads, opt.init(params), params)
    np.testing.assert_allclose(updates[:3], [-1, 1, -1], 1e-5)
    assert state[0].nu.root.data[3] == 0 and (state[0].nu.root.data[:3] > 0).all()
    seen = [updates]
    for _ in range(20):  # 1 is what Adam makes of a gradient that stays; roots are off by 2**-4
        updates, state = update(grads, state, params)
        seen.append(updates)
    assert np.abs(np.asarray(seen)[:, :3]).max() < 1.25


FULL = pytest.mark.full
OPTIMIZERS = {
    "adam": lambda: optax.adam(0.1),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),  # counts no steps
    "lion": lambda: optax.lion(0.1),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float16, marks=FULL), E4M3, E5M2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_without_gradients_fade_away(name, dtype):
    """As of a row that does not occur: rounded back by the same bits, a moment would stay."""
    params = jnp.zeros(4096)
    opt = low(OPTIMIZERS[name](), first_moment_dtype=dtype, second_moment_dtype=dtype)
    grads = jax.random.normal(jax.random.key(0), params.shape)

    @jax.jit
    def run(grads):
        _, state = opt.update(grads, opt.init(params), params)
        # Another element has a gradient: the scale stays.
        rest = jnp.zeros_like(grads).at[0].set(3.0)
        body = lambda state, _: (opt.update(rest, state, params)[1], None)  # noqa: E731
        return jax.lax.scan(body, state, None, length=2000 if name == "lion" else 600)[0]

    state = run(grads)
    first = {
        "adam": lambda: state[0].mu,
        "sgd": lambda: state[0].trace,
        "lion": lambda: state[0].mu,
    }
    kept = np.float32(first[name]().data)[1:]
    assert not kept.any(), f"{np.count_nonzero(kept)} of {kept.size} are left"
    if name == "adam":
        nu = state[0].nu
        value = np.float32(nu.data if dtype == jnp.float16 else nu.root.data)
        assert (value > 0).all()


FAMILY = {
    "amsgrad": (lambda: optax.amsgrad(0.1), 2),
    "adagrad": (lambda: optax.adagrad(0.1), 1),
    "rmsprop": (lambda: optax.rmsprop(0.1, momentum=0.9), 1),
    "adabelief": (lambda: optax.adabelief(0.1), 1),
    "lion": (lambda: optax.lion(0.1), 0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAMILY)
def test_which_leaves_are_roots(name):
    make, count = FAMILY[name]
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    opt = low(make(), second_moment_dtype=E4M3)
    state = opt.init(params)
    is_root = lambda x: isinstance(x, jsa.optim.SquareRoot)  # noqa: E731
    roots = list(filter(is_root, jax.tree.leaves(state, is_leaf=is_root)))
    assert len(roots) == 2 * count and {x.root.dtype for x in roots} <= {jnp.dtype(E4M3)}
    grads = jax.tree.map(lambda p: 1e-3 * p, params)
    for _ in range(3):
        updates, new = jax.jit(opt.update)(grads, state, params)
        assert jsa.tree.structure(new) == jsa.tree.structure(state)
        state = new
    plain = make()
    wanted = plain.init(params)
    for _ in range(3):
        steps, wanted = plain.update(grads, wanted, params)
    for got, want in zip(jax.tree.leaves(updates), jax.tree.leaves(steps), strict=True):
        np.testing.assert_allclose(got, want, 0.15, 1e-6)


def test_in_a_scalified_step_it_makes_four_bytes_a_parameter(tmp_path):
    params = jsa.as_scaled_array({"w": jnp.ones((64, 64))}, scale="rms", dtype=jnp.float16)
    opt = low(optax.adamw(1e-2), first_moment_dtype=E4M3, second_moment_dtype=E4M3)

    @jax.jit
    @jsa.scalify
    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.square(x @ p["w"]).mean().astype(jnp.float32))(params)
        updates, state = opt.update(grads, state, params)
        return jsa.optim.apply_updates(params, updates), state

    x = jax.random.normal(jax.random.key(0), (16, 64), jnp.float16)
    first = params, jsa.as_scaled_array(opt.init(params))
    state = step(*first, x)
    assert jsa.tree.structure(state) == jsa.tree.structure(first)
    assert sum(x.nbytes for x in jax.tree.leaves(state)) / 4096 == pytest.approx(4, abs=0.01)
    _, nu = moments(state[1])
    grads = jax.grad(lambda w: jnp.square(np.float32(x) @ w).mean())(jnp.ones((64, 64)))
    np.testing.assert_allclose(nu, 1e-3 * np.float64(grads) ** 2, 0.25)

    frozen = jsa.freeze_scales(state)
    for _ in range(2):
        frozen = step(*frozen, x)
    assert step._cache_size() == 2
    jsa.checkpoint.save(tmp_path / "state", frozen)
    restored = jsa.checkpoint.restore(tmp_path / "state", like=frozen)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(frozen), strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_a_step_that_is_put_off_changes_no_bit():
    """As `MultiSteps` has between two steps: a root of its square is what it was."""
    params = jnp.ones(1000)
    inner = optax.MultiSteps(optax.adam(0.1), 2)
    opt = low(inner, second_moment_dtype=E4M3)
    update, state = jax.jit(opt.update), opt.init(params)
    grads = jax.random.normal(jax.random.key(0), (4, 1000))
    for i in range(4):
        before, (_, state) = state, update(grads[i], state, params)
        if i == 2:
            kept = before.inner_opt_state[0].nu, state.inner_opt_state[0].nu
            np.testing.assert_array_equal(*(np.float32(x.root.data) for x in kept))


def test_a_state_that_does_not_match_is_named():
    opt = low(optax.adam(0.1), second_moment_dtype=E4M3)
    with pytest.raises(ValueError, match=r"`state\[0\]\.nu` is of shape \(2,\), .*\(3,\)"):
        adam, rest = opt.init(jnp.ones(3))
        adam = adam._replace(nu=opt.init(jnp.ones(2))[0].nu)
        opt.update(jnp.ones(3), (adam, rest), jnp.ones(3))
