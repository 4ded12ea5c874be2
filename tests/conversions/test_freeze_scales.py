"""Static scales of a state: `freeze_scales` and `thaw_scales`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray

DTYPES = ("float32", "float16", "bfloat16")


def scale_of(x):
    return np.asarray(x.scale)


class TestFreezeThaw:
    def test_round_trip(self):
        tree = jsa.as_scaled_array({"w": jnp.ones(3), "i": jnp.arange(2)}, 4.0)
        frozen = jsa.freeze_scales(tree)
        assert frozen["w"].is_static and frozen["w"].scale == 4
        thawed = jsa.thaw_scales(frozen)
        assert jax.tree.structure(thawed) == jax.tree.structure(tree)
        assert thawed["w"].scale.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(thawed["w"]), np.asarray(tree["w"]))
        assert jsa.freeze_scales(frozen)["w"].scale == 4

    def test_scales_per_axis_stay_dynamic(self):
        x = jsa.as_scaled_array(jnp.ones((2, 3)), axis=0)
        assert not jsa.freeze_scales(x).is_static

    @pytest.mark.parametrize("dtype, room", [("float16", 10), ("float8_e4m3fn", 3)])
    def test_data_near_the_top_gets_room(self, dtype, room):
        top = float(jnp.finfo(dtype).max)
        x = ScaledArray(jnp.asarray([top / 2, 1.0, 0.0, jnp.nan], dtype), jnp.float32(4))
        frozen = jsa.freeze_scales(x)
        np.testing.assert_array_equal(
            np.asarray(frozen.to_array(jnp.float32)), [2 * top, 4, 0, np.nan]
        )
        data = np.asarray(frozen.data, np.float32)
        assert top / 2 ** (room + 1) <= data[0] <= top / 2**room
        assert jsa.freeze_scales(frozen).scale == frozen.scale

    def test_data_that_has_room_is_not_copied(self):
        for x in (jnp.ones(3, jnp.float16), jnp.full(3, 1e30), jnp.full(3, 1e30, jnp.bfloat16)):
            frozen = jsa.freeze_scales(ScaledArray(x, jnp.float32(4)))
            assert frozen.data is x and frozen.scale == 4

    def test_what_is_not_zero_stays_so(self):
        x = ScaledArray(jnp.asarray([6e4, 6e-8, -6e-8], jnp.float16), jnp.float32(1))
        data = np.asarray(jsa.freeze_scales(x).data, np.float64)
        np.testing.assert_array_equal(data[1:], [2.0**-24, -(2.0**-24)])

    def test_a_scale_at_the_end_of_its_range(self):
        x = ScaledArray(jnp.asarray([6e4], jnp.float16), jnp.float32(2.0**125))
        assert jsa.freeze_scales(x).scale == 2.0**126

    def test_zero(self):
        frozen = jsa.freeze_scales(jsa.as_scaled_array(jnp.zeros(2)))
        out = jsa.scalify(lambda x, y: x + y)(frozen, ScaledArray(jnp.ones(2), 2.0**-20))
        assert out.scale == 2.0**-20
