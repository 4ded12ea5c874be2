"""`numerics.hlo`: what is read from the text of compiled programs.

`programs/cpu.hlo` was compiled; those for GPUs were written by hand, see their first lines.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_scalify.numerics.hlo import Sizes, parse_program

PROGRAMS = Path(__file__).parent / "programs"


def parse(name):
    return parse_program((PROGRAMS / f"{name}.hlo").read_text())


def described(program):
    return [(m.op_name, m.kernel, m.sizes, m.is_fp8) for m in program.matmuls]


def test_cpu():
    program = parse("cpu")
    assert described(program) == [
        (
            "jit(f)/scores/btc,bsc->bts/dot_general",
            "ynn_fusion f32 x f32",
            Sizes(2, 8, 64, 8),
            False,
        ),
        ("jit(f)/up/dot_general", "ynn_fusion f32 x f32", Sizes(1, 16, 32, 64), False),
        # It has no name of its own: that is on the fusion that transposes the result.
        ("jit(f)/conv/conv_general_dilated", "XLA f32 x f32", None, False),
    ]
    assert program.others["jit(f)/up/dot_general"] >= {"convert", "bitcast"}


def test_cublaslt_fp8_and_what_fell_back():
    name = "jit(update)/transpose(jvp(GPT))/up/dot_general"
    assert described(parse("cublaslt_fp8")) == [
        (
            "jit(update)/jvp(GPT)/up/dot_general",
            "cuBLASLt f8e4m3fn x f8e4m3fn",
            Sizes(1, 16, 32, 64),
            True,
        ),
        (name, "cuBLASLt f8e4m3fn x f8e5m2", Sizes(1, 32, 16, 64), True),
        (name, "cuBLAS f16 x f16", Sizes(1, 16, 64, 32), False),
        ("", "cuBLASLt f32 x f32", Sizes(1, 8, 8, 8), False),
    ]


def test_triton_fp8_is_told_by_the_operands_of_the_dot():
    assert described(parse("triton_fp8")) == [
        ("jit(f)/plain/dot_general", "Triton f8e4m3fn x f8e4m3fn", Sizes(1, 32, 64, 128), True),
        ("jit(f)/nested/dot_general", "Triton f8e5m2 x f8e4m3fn", Sizes(1, 32, 64, 128), True),
        ("jit(f)/converted/dot_general", "Triton bf16 x bf16", Sizes(4, 32, 64, 128), False),
    ]


@pytest.mark.parametrize("backend_config", ["", ", backend_config={", ", backend_config={}"])
def test_a_custom_call_without_dimensions_has_no_sizes(backend_config):
    text = f"""HloModule m
ENTRY %main (a: f8e4m3fn[16,16]) -> f16[16,16] {{
  %a = f8e4m3fn[16,16]{{1,0}} parameter(0)
  ROOT %c = f16[16,16]{{1,0}} custom-call(%a, %a), custom_call_target="__cublas$lt$matmul$f8"{backend_config}
}}
"""  # noqa: E501
    (matmul,) = parse_program(text).matmuls
    assert (matmul.sizes, matmul.is_fp8, matmul.op_name) == (None, True, "")


def test_fp8_operands_of_an_unknown_library_are_no_proof():
    text = (PROGRAMS / "triton_fp8.hlo").read_text().replace("__triton", "__other")
    assert [m.is_fp8 for m in parse_program(text).matmuls] == [None, None, False]
    text = text.replace('"kind"', '"what"')
    assert [(m.library, m.is_fp8) for m in parse_program(text).matmuls] == [
        ("XLA", None),
        ("XLA", None),
        ("XLA", False),
    ]


@pytest.mark.parametrize("text", ["", "no program", "HloModule m\n\nENTRY %e () -> () {\n}\n"])
def test_text_without_matmuls(text):
    assert not parse_program(text).matmuls


def test_what_is_compiled_here():
    x = jnp.ones((4, 32, 16), jnp.float16)
    compiled = jax.jit(lambda a: jnp.einsum("bij,bkj->bik", a, a)).lower(x).compile()
    (matmul,) = parse_program(compiled.as_text()).matmuls
    assert matmul.sizes == Sizes(4, 32, 16, 32)
    assert matmul.lhs == matmul.rhs
    assert matmul.op_name.endswith("bij,bkj->bik/dot_general")
