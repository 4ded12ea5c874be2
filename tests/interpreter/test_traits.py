"""What is known of a primitive beside its law."""

import jax.numpy as jnp
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.interpreter import registry
from jax_scalify.interpreter.traits import ELEMENTS, Traits, traits_of
from tests.opaque import opaque_primitive

double_p = opaque_primitive("double_of_test_traits", lambda x: x * 2)


def test_every_primitive_of_the_package_declares_what_its_elements_are():
    rules = registry._rules.values()
    own = [i.name for i in rules if i.rule.__module__.startswith("jax_scalify.rules")]
    assert [name for name in own if traits_of(name).elements is None] == []
    assert len(own) > 200
    used = {traits_of(name).elements for name in own}
    assert used == set(ELEMENTS)


def _register(**traits):
    @jsa.register_scale_rule(double_p, **traits)
    def double_rule(ctx, x, **params):
        """`out = f(data)`, scale unchanged."""
        return ScaledArray(ctx.bind(x.data, **params), x.scale)


def _scale_of_sum():
    x = jsa.scaled_array(jnp.ones(1024), 1.0)
    return float(jsa.scalify(lambda x: double_p.bind(x * x).sum())(x).scale)


def test_a_fact_holds_through_a_primitive_that_declares_it():
    computed, positive = 2.0**8, 2.0**10  # 1024 ** (7 / 8), rounded down, and 1024
    _register()
    assert _scale_of_sum() == computed
    _register(elements="new", nonnegative="keeps")
    assert _scale_of_sum() == positive
    _register(elements="moved")
    assert _scale_of_sum() == positive
    _register(elements="negated")
    assert _scale_of_sum() == computed
    _register()  # another rule is no other primitive: what was declared holds
    assert _scale_of_sum() == computed
    _register(elements="moved")
    _register()
    assert _scale_of_sum() == positive


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        (dict(elements="old"), "`elements` must be one of .*'moved'.* got 'old'"),
        (dict(nonnegative=True), "`nonnegative` must be one of .*'keeps'.* got True"),
        (dict(degree="square"), "`degree` must be one of .* or a number, got 'square'"),
    ],
)
def test_what_is_not_known_is_refused(traits, message):
    with pytest.raises(ValueError, match=message):
        _register(**traits)


def test_of_an_undeclared_primitive_nothing_is_known():
    assert traits_of("no such primitive") == Traits()
    assert not Traits().keeps_nonnegative and not Traits().is_given


def test_a_rule_by_name_replaces_the_rule_of_a_primitive(monkeypatch):
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))

    @jsa.register_scale_rule("sin")
    def sin_rule(ctx, x, **params):
        """`scale = 4 * scale`."""
        return jsa.ScaledArray(x.data, 4 * x.scale)

    got = jsa.scalify(jnp.sin)(jsa.scaled_array(jnp.ones(3, jnp.float16), 2.0))
    assert jsa.asarray(got).tolist() == [8, 8, 8]
