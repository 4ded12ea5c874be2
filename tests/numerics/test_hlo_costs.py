"""`numerics.hlo_costs`: launches, bytes and collectives, counted in the text of a program.

`programs/costs.hlo` was written by hand, see its first lines.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jax_scalify.numerics.hlo_costs import Collective, count_costs, sizes_by_dtype

PROGRAM = (Path(__file__).parent / "programs" / "costs.hlo").read_text()

# As a TPU7x runs them: on its SparseCores, and inside of a fusion.
TPU = """
%called (p: bf16[512]) -> bf16[4096] {
  %p = bf16[512]{0} parameter(0)
  ROOT %gather = bf16[4096]{0} all-gather(%p), dimensions={0}
}, execution_thread="sparsecore"

%body (q: f32[1024]) -> f32[128] {
  %q = f32[1024]{0} parameter(0)
  ROOT %scatter = f32[128]{0} reduce-scatter(%q), dimensions={0}, to_apply=%add
}

ENTRY %main (x: bf16[512], y: f32[1024]) -> f32[128] {
  %x = bf16[512]{0} parameter(0)
  %y = f32[1024]{0} parameter(1)
  %start = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=%called
  %done = () call-done(%start)
  ROOT %fused = f32[128]{0} fusion(%y), kind=kCustom, calls=%body
}
"""


@pytest.fixture(scope="module")
def costs():
    return count_costs(PROGRAM)


def test_launches_count_as_often_as_they_run(costs):
    runs = {k.name: k.runs for k in costs.kernels}
    once = {"all": 1, "reduce-start": 1, "gemm": 1, "scalar": 1}
    assert runs == {"slice.1": 4, "update.1": 4, "less": 4} | once
    assert costs.launches == 16 and costs.endless == 0


def test_slices_and_updates_in_place_move_what_they_touch(costs):
    sizes = {k.name: k.bytes for k in costs.kernels}
    assert sizes["slice.1"] == 2048 + 4 + 2048
    assert sizes["update.1"] == 2048 + 4 + 2048
    assert sizes["gemm"] == 2 * 8192 + 32  # its workspace is not read
    assert sizes["scalar"] == 12
    assert costs.bytes_moved == sum(k.runs * k.bytes for k in costs.kernels)
    assert costs.tiny == 4 + 1 + 1  # comparisons, the all-reduce, the scalar
    assert {k.op_name for k in costs.kernels if k.name == "gemm"} == {"jit(step)/dot_general"}


def test_collectives_inside_of_asynchronous_calls_too(costs):
    assert costs.collectives == (
        Collective("all-gather", "f8e4m3fn", 1, 1024 * 64),
        Collective("all-reduce", "bf16", 1, 512),
    )


def test_collectives_that_a_tpu_starts_on_its_other_cores_or_fuses():
    costs = count_costs(TPU)
    assert costs.collectives == (
        Collective("all-gather", "bf16", 1, 8192),
        Collective("reduce-scatter", "f32", 1, 4096),
    )
    assert {k.name: k.opcode for k in costs.kernels} == {"gather": "all-gather", "fused": "fusion"}


def test_a_loop_of_unknown_length_counts_once():
    costs = count_costs(PROGRAM.replace('"known_trip_count":{"n":"4"}', ""))
    assert costs.endless == 1 and costs.launches == 7


def test_starts_that_hold_their_operands():
    text = PROGRAM.replace(
        "%reduce-start = bf16[256]{0} all-reduce-start(%g), to_apply=%fused_add",
        "%reduce-start = (bf16[256]{0}, bf16[2048]{0}) all-gather-start(%g), dimensions={0}",
    )
    costs = count_costs(text)
    assert Collective("all-gather", "bf16", 1, 4096) in costs.collectives
    assert {k.bytes for k in costs.kernels if k.name == "reduce-start"} == {512 + 4096}


@pytest.mark.parametrize(
    ("hlo_type", "sizes"),
    [
        ("f32[]", {"f32": 4}),
        ("(bf16[2,3]{1,0:T(8,128)(2,1)}, f32[4]{0:S(1)}, token[])", {"bf16": 12}),
        ("s4[3]{0}", {"s4": 2}),
        ("pred[0,5]{1,0}", {"pred": 0}),
        ("f4e2m1fn[16]{0}", {"f4e2m1fn": 8}),
        ("c64[2]{0}", {"c64": 16}),
        ("f32[<=8]{0}", {"f32": 32}),
    ],
)
def test_sizes(hlo_type, sizes):
    assert sizes_by_dtype(hlo_type) == sizes


def test_a_program_of_this_machine():
    def function(x):
        def step(c, row):
            return jnp.tanh(c + row), c.sum()

        return lax.scan(step, x[0], x)

    compiled = jax.jit(function).lower(jnp.ones((6, 512))).compile()
    costs = count_costs(compiled.as_text())
    assert costs.endless == 0 and {k.runs for k in costs.kernels} >= {6}
    assert costs.bytes_moved >= 6 * 3 * 2048
