"""`numerics.check_fp8`: every matmul, as traced and as compiled."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_scalify as jsa
from jax_scalify.numerics import check_fp8
from jax_scalify.numerics.check_fp8 import match
from jax_scalify.numerics.hlo import CompiledMatmul, Program, Sizes, parse_program
from jax_scalify.numerics.scopes import clean_name

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
MATMUL = (((1,), (0,)), ((), ()))
PROGRAMS = Path(__file__).parent / "programs"

traced_only = functools.partial(check_fp8, compile=False)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def scaled(*shape, dtype=jnp.float16):
    return jsa.ScaledArray(array(*shape, dtype=dtype), array())


def dot(lhs, rhs, dims=MATMUL, out=jnp.float32):
    return lax.dot_general(lhs, rhs, dims, preferred_element_type=out)


def model(params, x):
    with jax.named_scope("up"):
        x = jnp.tanh(jsa.nn.dot_general(x, params["up"], MATMUL))
    with jax.named_scope("down"):
        return jsa.nn.dot_general(x, params["down"], MATMUL)


def update(params, x):
    def loss(params):
        with jax.named_scope("model"):
            return model(params, model(params, x)).astype(jnp.float32).sum()

    return jax.value_and_grad(loss)(params)


PARAMS = {"up": scaled(32, 64), "down": scaled(64, 32)}
X = scaled(48, 32)


def products(report, name, phase):
    found = [r for r in report.rows if (r.name, r.phase) == (name, phase)]
    return sorted((r.sizes.m, r.sizes.k, r.sizes.n, r.lhs, r.rhs) for r in found)


def test_both_passes_of_a_scalified_step():
    report = check_fp8(jsa.scalify(update), PARAMS, X)
    e4, e5 = "f8e4m3fn", "f8e5m2"
    assert products(report, "model/up", "forward") == [(48, 32, 64, e4, e4)] * 2
    assert products(report, "model/down", "forward") == [(48, 64, 32, e4, e4)] * 2
    dgrad, wgrad = (48, 64, 32, e5, e4), (64, 48, 32, e5, e4)
    # One dgrad less: nobody asks for the gradient of `x`.
    assert products(report, "model/up", "backward") == [dgrad, wgrad, wgrad]
    dgrad, wgrad = (48, 32, 64, e5, e4), (32, 48, 64, e5, e4)
    assert products(report, "model/down", "backward") == [wgrad, wgrad, dgrad, dgrad]
    assert all(r.eligible and r.is_fp8 is False and r.out == "bf16" for r in report.rows)
    assert {r.kernel.partition(" ")[2] for r in report.rows} <= {"f32 x f32", "bf16 x bf16"}
    assert not report.unmatched
    assert report.summary == (
        "11 of 11 matmuls have FP8 operands; 0 run as FP8 on this cpu; "
        "11 would be eligible on a GPU."
    )


def test_the_summary_says_that_block_formats_need_a_blackwell_gpu():
    x, w = scaled(32, 64), scaled(64, 64)
    blocks = jsa.nn.DotGeneral(forward_dtype="mxfp8", backward_dtype="mxfp8")
    fp8 = jsa.nn.DotGeneral()
    summary = traced_only(jsa.scalify(lambda x, w: blocks(x, w, MATMUL)), x, w).summary
    assert summary.endswith("; 1 would be eligible on a Blackwell GPU (not compiled).")
    both = jsa.scalify(lambda x, w: blocks(fp8(x, w, MATMUL), w, MATMUL))
    wanted = "; 2 would be eligible on a GPU, 1 of them on a Blackwell GPU (not compiled)."
    assert traced_only(both, x, w).summary.endswith(wanted)


CASES = {
    "both E4M3": ((E4M3, E4M3), MATMUL, jnp.bfloat16, None),
    "E5M2 first": ((E5M2, E4M3), MATMUL, jnp.float16, None),
    "E5M2 second": ((E4M3, E5M2), MATMUL, jnp.float32, None),
    "both E5M2": ((E5M2, E5M2), MATMUL, jnp.float16, "f8e5m2 x f8e5m2"),
    "result in FP8": ((E4M3, E4M3), MATMUL, None, "the result is f8e4m3fn: set `preferred"),
    "bfloat16": ((jnp.bfloat16, jnp.bfloat16), MATMUL, jnp.float32, "operands are not FP8"),
    "one in FP8": ((jnp.bfloat16, E4M3), MATMUL, jnp.float32, "only one operand is FP8"),
    "another FP8": (
        (jnp.float8_e4m3fnuz, jnp.float8_e4m3fnuz),
        MATMUL,
        jnp.float32,
        "f8e4m3fnuz: NVIDIA GPUs know",
    ),
    "contracting all": ((E4M3, E4M3), (((0, 1), (1, 0)), ((), ())), jnp.float32, "lhs has no free"),
    "nothing contracted": (
        (E4M3, E4M3),
        (((), ()), ((), ())),
        jnp.float32,
        "nothing is contracted",
    ),
    "batch": ((E4M3, E4M3), (((1,), (1,)), ((0,), (0,))), jnp.float32, "lhs has no free dim"),
}


@pytest.mark.parametrize("name", CASES)
def test_eligible_or_the_reason_why_not(name):
    (lhs, rhs), dims, out, reason = CASES[name]
    (row,) = traced_only(
        lambda a, b: dot(a, b, dims, out), array(32, 32, dtype=lhs), array(32, 32, dtype=rhs)
    ).rows
    assert row.eligible == (reason is None)
    assert row.has_fp8_operands == ("FP8" not in (reason or ""))
    assert any(note.startswith(reason or "") for note in row.notes) or not row.notes
    assert bool(row.notes) == (not row.eligible)


def test_two_free_dims_and_a_batch():
    x, w = array(4, 16, 32, dtype=E4M3), array(32, 64, dtype=E4M3)
    (row,) = traced_only(lambda x, w: dot(x, w, (((2,), (0,)), ((), ()))), x, w).rows
    assert row.sizes == Sizes(1, 64, 32, 64)
    assert row.eligible  # XLA merges them
    (row,) = traced_only(lambda x: dot(x, x, (((2,), (2,)), ((0,), (0,)))), x).rows
    assert row.sizes == Sizes(4, 16, 32, 16)
    assert row.eligible


def test_sizes_that_are_no_multiple_of_16_get_a_note():
    (row,) = traced_only(dot, array(10, 32, dtype=E4M3), array(32, 16, dtype=E4M3)).rows
    assert row.eligible
    assert "multiple of 16" in row.notes[0]


# Structure


def test_loops_say_how_often():
    def fun(x):
        def body(x, _):
            x, _ = lax.scan(lambda x, _: (x @ x, None), x, length=3)
            return x, None

        x, _ = lax.scan(body, x @ x, length=5)
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x)

    report = check_fp8(fun, array(16, 16))
    assert [r.runs for r in report.rows] == [1, 15, None]
    assert all(r.kernel.endswith("f32 x f32") for r in report.rows)
    assert "?" in str(report)


@jax.custom_jvp
def with_jvp(x):
    return x @ x


with_jvp.defjvp(lambda x, t: (with_jvp(*x), t[0] @ x[0]))


@jax.custom_vjp
def with_vjp(x):
    return x @ x


with_vjp.defvjp(lambda x: (x @ x, x), lambda x, ct: (ct @ x,))


@pytest.mark.parametrize(
    ("wrap", "count"),
    [
        (jax.jit, 1),
        (jax.checkpoint, 1),
        (lambda f: lambda x: lax.cond(x.sum() > 0, f, lambda x: f(-x), x), 2),
        (lambda f: with_jvp, 1),
        (lambda f: with_vjp, 1),
        (lambda f: lambda x: jax.jvp(with_jvp, (x,), (x,)), 2),
        (lambda f: jax.grad(lambda x: with_vjp(x).sum()), 1),
        (lambda f: lambda x: jax.vmap(f)(x[None]), 1),
        (
            lambda f: jax.shard_map(
                f, mesh=jax.make_mesh((1,), ("i",)), in_specs=P(), out_specs=P()
            ),
            1,
        ),
    ],
)
def test_matmuls_inside_of_other_primitives(wrap, count):
    def inner(x):
        with jax.named_scope("inner"):
            return x @ x

    report = check_fp8(lambda x: wrap(inner)(x), array(16, 16))
    found = [r for r in report.rows if r.kernel != "not found"]
    assert len(found) == count
    assert all(r.kernel.endswith("f32 x f32") for r in found)
    assert not report.unmatched


def test_remat_computes_the_forward_pass_again():
    def loss(params, x):
        with jax.named_scope("model"):
            return jax.checkpoint(model)(params, x).sum()

    params = {"up": array(32, 64), "down": array(64, 32)}
    report = traced_only(jax.value_and_grad(loss), params, array(48, 32))
    phases = [(r.name, r.phase) for r in report.rows]
    assert ("model/up", "forward") in phases
    assert ("model/up", "recompute") in phases
    assert phases.count(("model/up", "backward")) == 1
    assert phases.count(("model/down", "backward")) == 2


def test_what_no_result_needs_is_not_listed():
    @jax.jit
    def both(x):
        return x @ x, x @ x.T

    loss = lambda x: both(x)[0].sum()  # noqa: E731
    assert len(check_fp8(loss, array(16, 16)).rows) == 1
    report = check_fp8(jax.grad(loss), array(16, 16))
    assert [r.phase for r in report.rows] == ["backward"] * 2
    assert not any(r.kernel == "not found" for r in report.rows)


def test_convolutions_and_ragged_dots_are_listed():
    def fun(image, kernel, x, w):
        with jax.named_scope("conv"):
            y = lax.conv(image, kernel, (1, 1), "SAME")
        return y, lax.ragged_dot(x, w, jnp.array([10, 6]))

    shapes = [(2, 3, 8, 8), (4, 3, 3, 3), (16, 64), (2, 64, 16)]
    report = check_fp8(fun, *[array(*s) for s in shapes])
    conv, ragged = report.rows
    assert conv.sizes == Sizes(1, 2 * 8 * 8, 3 * 3 * 3, 4)
    assert ragged.sizes == Sizes(1, 16, 64, 16)
    assert "a convolution" in conv.notes[1]
    assert "a ragged dot" in ragged.notes[1]
    assert conv.kernel.endswith("f32 x f32")
    assert ragged.kernel.endswith("f32 x f32")


def test_a_dot_that_became_other_code_or_nothing():
    program = Program((), {"jit(f)/dot_general": frozenset({"multiply", "reduce", "bitcast"})})
    report = traced_only(jnp.dot, array(16, 16), array(16, 16))
    ((row,), _) = match(report.rows, program)
    assert (row.kernel, row.is_fp8) == ("no matmul", False)
    ((row,), _) = match(report.rows, Program((), {}))
    assert (row.kernel, row.is_fp8) == ("not found", None)


def test_merged_matmuls_are_what_they_were_merged_into():
    def fun(x):
        return x @ x, lax.dot_general(x, x, MATMUL)

    report = check_fp8(fun, array(16, 16))
    assert [r.is_fp8 for r in report.rows] == [False, False]
    assert "fewer compiled than traced" in str(report)
    assert "unknown" not in report.summary


def test_fewer_compiled_matmuls_beside_other_code_of_their_name_are_not_certain():
    """One may have become that code, and the other not."""

    def fun(x):
        return x @ x, lax.dot_general(x, x, MATMUL)

    report = traced_only(fun, array(16, 16))
    kernel = CompiledMatmul("jit(f)/dot_general", "cuBLASLt", "f16", "f16", Sizes(1, 16, 16, 16))
    others = {kernel.op_name: frozenset({"multiply", "reduce"})}
    rows, _ = match(report.rows, Program((kernel,), others))
    assert [r.is_fp8 for r in rows] == [None, None]
    rows, _ = match(report.rows, Program((kernel,), {kernel.op_name: frozenset({"bitcast"})}))
    assert [r.is_fp8 for r in rows] == [False, False]


# GPUs: programs that were written by hand


def gpu_step(x, w):
    with jax.named_scope("GPT"):
        with jax.named_scope("up"):
            y = jsa.nn.dot_general(x, w, (((1,), (1,)), ((), ())))
        return y.astype(jnp.float32).sum()


def test_kernels_of_a_gpu():
    program = parse_program((PROGRAMS / "cublaslt_fp8.hlo").read_text())
    step = jax.value_and_grad(gpu_step, (0, 1))
    report = traced_only(jax.jit(step), array(10, 32), array(64, 32))
    rows, unmatched = match(report.rows, program)
    forward, dgrad, wgrad = rows
    assert forward.kernel == "cuBLASLt f8e4m3fn x f8e4m3fn"
    assert wgrad.kernel == "cuBLASLt f8e4m3fn x f8e5m2"
    assert dgrad.kernel == "cuBLAS f16 x f16"
    assert [r.is_fp8 for r in rows] == [True, False, True]
    assert "padded to multiples of 16" in forward.notes[-1]
    assert dgrad.notes[-1] == "FP8 operands were converted to f16"
    assert unmatched == ("cuBLASLt f32 x f32",)
    report = jsa.numerics.Fp8Report(rows, "gpu", unmatched)
    assert report.summary == (
        "3 of 3 matmuls have FP8 operands; 2 run as FP8 (cuBLASLt), 1 eligible ones fell back."
    )
    assert "match no traced one: cuBLASLt f32 x f32 (1x)" in str(report)


def test_triton_kernels_of_a_gpu():
    program = parse_program((PROGRAMS / "triton_fp8.hlo").read_text())

    def fun(a, b, c, d, e):
        with jax.named_scope("plain"):
            x = dot(a, b)
        with jax.named_scope("nested"):
            y = dot(c, b)
        with jax.named_scope("converted"):
            return x, y, dot(d, e, (((2,), (1,)), ((0,), (0,))))

    shapes = [(32, 64), (64, 128), (32, 64), (4, 32, 64), (4, 64, 128)]
    dtypes = [E4M3, E4M3, E5M2, E4M3, E4M3]
    report = traced_only(fun, *[array(*s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)])
    rows, unmatched = match(report.rows, program)
    assert [r.is_fp8 for r in rows] == [True, True, False]
    assert rows[2].notes == ("FP8 operands were converted to bf16",)
    assert not unmatched


def test_kernels_that_differ_under_one_name_are_not_guessed():
    text = (PROGRAMS / "triton_fp8.hlo").read_text()
    program = parse_program(re.sub("jit.f./(nested|plain)/", "", text))
    fun = lambda a, b, c: (dot(a, b), dot(c, b))  # noqa: E731
    shapes = [array(32, 64, dtype=E4M3), array(64, 128, dtype=E4M3), array(32, 64, dtype=E5M2)]
    rows, _ = match(traced_only(fun, *shapes).rows, program)
    assert rows[0].kernel == "Triton f8e4m3fn x f8e4m3fn or Triton f8e5m2 x f8e4m3fn"
    assert all(r.is_fp8 for r in rows)  # whichever it is
    assert "several kernels" in rows[0].notes[-1]


# Names


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("jit(update)/transpose(jvp(GPT))/block_0/attention/out/dot_general",) * 2,
        ("jit(f)/transpose(jvp())/while/body/closed_call/dot_general", ""),
        ("jit(f)/jvp(a)/cond/branch_1_fun/vmap(b)/btw,wv->btv/dot_general", "a/b/btw,wv->btv"),
        ("transpose(jvp(G))/b/jvp(G)/b/checkpoint/rematted_computation/up/dot_general", "G/b/up"),
        ("jit(f)/jit(main)/scope (1)/dot_general", "scope (1)"),
        ("dot_general", ""),
    ],
)
def test_names_are_those_of_the_user(path, name):
    assert clean_name(path) == name.replace("jit(update)/transpose(jvp(GPT))", "GPT").removesuffix(
        "/dot_general"
    )


def test_a_line_of_the_model_is_named():
    from jax_scalify.nn import nnx

    layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    (row,) = traced_only(lambda x: layer(x), array(16, 16)).rows
    assert "test_check_fp8.py" in row.line


@pytest.mark.full
def test_a_cached_program_does_not_bring_the_names_of_another(tmp_path):
    code = """
import jax, jax_scalify as jsa
for name in "ab":
    def fun(x):
        with jax.named_scope(name):
            return jax.numpy.tanh(x) @ x
    report = jsa.numerics.check_fp8(fun, jax.ShapeDtypeStruct((16, 16), "float32"))
    jax.jit(fun).lower(jax.ShapeDtypeStruct((16, 16), "float32")).compile()
    assert report.rows[0].notes == ("operands are not FP8",), report
"""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(jsa.__file__).parents[1]),
    }
    subprocess.run([sys.executable, "-c", code], env=settings, check=True)
    assert any(tmp_path.iterdir())


# Arguments and results


def plain_sum(params, x):
    return model(params, x).sum()


@pytest.mark.parametrize("operands", ["plain", "scaled"])
@pytest.mark.parametrize("concrete", [True, False])
@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jsa.scalify, lambda f: jax.jit(jsa.scalify(f))]
)
def test_functions_and_arguments_of_every_kind(wrap, concrete, operands):
    args = {"up": array(32, 64), "down": array(64, 32)}, array(48, 32)
    if concrete:
        args = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), args)
    fun = wrap(plain_sum)
    if operands == "scaled":
        fun = wrap(jsa.scalify(plain_sum))
        args = jax.eval_shape(jsa.as_scaled_array, args)
    report = traced_only(fun, *args)
    assert [(r.name, r.eligible) for r in report.rows] == [("up", True), ("down", True)]


def test_keywords_and_what_was_traced():
    traced = jax.jit(model).trace({"up": array(32, 64), "down": array(64, 32)}, x=array(48, 32))
    report = check_fp8(traced)
    assert len(report.rows) == 2
    assert report.backend == "cpu"
    static = jax.jit(lambda x, n: x @ x if n else x, static_argnames="n")
    assert len(traced_only(static, array(16, 16), n=True).rows) == 1
    assert not traced_only(static, array(16, 16), n=False).rows


def test_nothing_to_see():
    report = check_fp8(lambda x: x + 1, array(16))
    assert report.rows == ()
    assert str(report) == "No matmul in this computation."
    assert json.loads(report.to_json())["rows"] == []


def test_bad_arguments():
    lowered = jax.jit(jnp.tanh).lower(array(2))
    with pytest.raises(TypeError, match="`fun` must be callable, got int"):
        check_fp8(3)
    for stage in (lowered, lowered.compile()):
        with pytest.raises(TypeError, match=f"`fun` must be a function.*{type(stage).__name__}"):
            check_fp8(stage)
    with pytest.raises(
        TypeError, match=r"`args\[1\]` is of type object, no array.*static_argnames"
    ):
        check_fp8(lambda x, mode: x @ x, jnp.ones((2, 2)), object())
    with pytest.raises(TypeError, match="`args` must be left out"):
        check_fp8(jax.jit(jnp.tanh).trace(array(2)), array(2))


def test_the_report_as_text_and_as_json():
    report = check_fp8(jsa.scalify(update), PARAMS, X)
    text = str(report)
    assert repr(report) == text
    header, *lines = text.splitlines()
    assert header.split() == [
        *"name line pass batch M K N runs operands result eligible kernel notes".split()
    ]
    assert lines[0].split()[:8] == [
        "model/up",
        lines[0].split()[1],
        *"forward 1 48 32 64 1".split(),
    ]
    assert lines[-1] == report.summary
    converted = re.findall(r"(\d+)x: FP8 operands were converted to b?f(?:16|32)\n", text)
    assert sum(map(int, converted)) == 11
    loaded = json.loads(report.to_json())
    assert loaded["summary"] == report.summary
    assert len(loaded["rows"]) == 11
    assert loaded["rows"][0]["sizes"] == {"batch": 1, "m": 48, "k": 32, "n": 64}


def test_the_summary_says_what_other_matmuls_multiply():
    x16, x32 = jnp.ones((16, 16), jnp.float16), jnp.ones((16, 16))
    found = check_fp8(lambda x, y: (x @ x, y @ y, y @ y.T), x16, x32, compile=False)
    assert found.summary.startswith("0 of 3 matmuls have FP8 operands, 2 f32 x f32, 1 f16 x f16; ")
