"""Averages that 16 bits cannot hold are reported, once, with the user's line; nothing else is."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify.passes import averages

optax = pytest.importorskip("optax")


def said(fun, *args, dtype=jnp.float16, state=None):
    """The warnings of tracing a scalified function of weights and their average."""
    averages._warned.clear()
    scaled = jsa.as_scaled_array(jnp.ones((2, 3), dtype))
    args = (scaled, scaled if state is None else jsa.as_scaled_array(state), *args)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jax.eval_shape(jsa.scalify(fun), *args)
    return [str(w.message) for w in found]


def of_optax(step):
    return lambda new, old: optax.incremental_update(
        {"w": new, "b": new}, {"w": old, "b": old}, step
    )


def in_a_loop(new, old):
    def body(old, _):
        return optax.incremental_update(new, old, 5e-3), None

    return lax.scan(body, old, None, length=3)[0]


def in_a_branch(new, old):
    average = lambda old: optax.incremental_update(new, old, 1e-3)  # noqa: E731
    return jax.jit(lambda old: lax.cond(jnp.sum(old) > 0, average, lambda old: old, old))(old) * 1


@pytest.mark.parametrize(
    ("fun", "step"),
    [
        (of_optax(1e-4), "0.0001"),
        (of_optax(0.05), "0.05"),
        (in_a_loop, "0.005"),
        (in_a_branch, "0.001"),
    ],
)
def test_that_of_optax_is_reported_once_with_the_line(fun, step):
    (message,) = said(fun)
    assert message.startswith("`optax.incremental_update` at ")
    assert f"{__file__}:" in message
    assert f"a step of {step} is lost in float16" in message
    assert "Use `jsa.optim.incremental_update` or `jsa.optim.ema`" in message


def test_a_step_that_is_not_known():
    """An argument of Python's has no dtype that would widen the average."""
    for fun in (optax.incremental_update, jax.jit(optax.incremental_update)):
        (message,) = said(fun, 1e-4)
        assert "small steps are lost in float16" in message
        assert f"{__file__}:" in message


@pytest.mark.parametrize(
    "fun",
    [
        lambda new, old: 1e-4 * new + (1 - 1e-4) * old,
        lambda new, old: old * 0.9999 + new * 1e-4,
        lambda new, old: old + 1e-4 * (new - old),
    ],
)
def test_averages_written_by_hand(fun):
    (message,) = said(fun)
    assert message.startswith(f"An average at {__file__}:")
    assert "Use `jsa.optim.ema`, and `jsa.optim.low_precision` for moments" in message


def test_averages_of_optax_by_other_names():
    average = optax.ema(0.9999)
    (message,) = said(average.update, state=average.init(jnp.ones((2, 3), jnp.float16)))
    assert message.startswith("An average at ")
    adam = optax.adam(1e-3, b2=0.999)
    found = said(adam.update, state=adam.init(jnp.ones((2, 3), jnp.bfloat16)), dtype=jnp.bfloat16)
    assert len(found) == 1


@pytest.mark.parametrize(
    "fun",
    [
        of_optax(0.5),
        lambda new, old: 0.01 * new + 0.99 * old,  # a BatchNorm's statistics
        lambda new, old: 1e-4 * new + 1.01 * old,
        lambda new, old: old - 1e-4 * new,
        lambda new, old: 1e-4 * (new - 1) + old,
        lambda new, old: jnp.sum(1.0 * new + 1e-4 * old),  # terms of a loss
        lambda new, old: 1e-4 * new + 1.0 * jnp.tanh(old),
        lambda new, old: jnp.float32(1e-4) * new + jnp.float32(0.9999) * old,
        lambda new, old: jsa.optim.incremental_update(new, old, 1e-4),
    ],
)
def test_what_is_no_such_average_is_not_reported(fun):
    assert not said(fun)


def test_moments_of_low_precision_are_not_reported():
    adam = jsa.optim.low_precision(optax.adam(1e-3, b2=0.9999))
    assert not said(adam.update, state=adam.init(jnp.ones((2, 3), jnp.float16)))


def test_wide_averages_are_not_reported():
    assert not said(of_optax(1e-4), dtype=jnp.float32)
    assert said(of_optax(0.1), dtype=jnp.bfloat16)
