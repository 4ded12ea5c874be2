"""Random programs at a fixed seed; and the fuzzer itself: same programs, wrong rules, shrinking."""

import argparse
import subprocess
import sys

import numpy as np
import pytest
from jax import lax

from jax_scalify.arrays.scaled_array import ScaledArray
from tests.fuzz import __main__ as command
from tests.fuzz import steps
from tests.fuzz.programs import DTYPES, WRAPPERS, Discarded, Input, Program, Statement, generate
from tests.fuzz.running import check
from tests.fuzz.shrinking import shrink
from tests.helpers import replace_rule

SEED, PROGRAMS, BATCH = 3, 200, 10


pytestmark = pytest.mark.filterwarnings("ignore")


def _program(*sources, inputs=None, wrapper="plain", dtype="float32"):
    x0 = Input("x0", np.array([0.5, -1.0, 2.0, 0.25]), dtype, np.asarray(4.0))
    statements = tuple(Statement(f"r{k}", s, dtype) for k, s in enumerate(sources))
    outputs = (f"r{len(sources) - 1}",)
    return Program(inputs or (x0,), statements, outputs, wrapper, jitted=True)


@pytest.fixture
def wrong_sin(monkeypatch):
    """A rule for `sin` that is off by 20%."""

    def rule(ctx, x, **params):
        data = 1.2 * ctx.bind(ctx.dequantise(x), **params)
        return ScaledArray(data.astype(x.dtype), 1.0)

    replace_rule(monkeypatch, lax.sin_p, rule)


@pytest.mark.sampled(32)
@pytest.mark.parametrize("start", range(0, PROGRAMS, BATCH))
def test_random_programs(start):
    failed = []
    for index in range(start, start + BATCH):
        program = generate(SEED, index)
        try:
            failure = check(program)
        except Discarded:
            continue
        if failure is not None:
            failed.append(command.report(SEED, index, *shrink(program, failure)))
    assert not failed, "\n".join(failed)


@pytest.mark.full
def test_a_program_depends_on_its_seed_and_index_only():
    first = [generate(3, i).code() for i in (5, 6, 7)]
    again = [generate(3, i).code() for i in (7, 5)]
    assert again == [first[2], first[0]]
    assert generate(4, 5).code() != first[0]
    script = "from tests.fuzz.programs import generate; print(generate(3, 5).code(), end='')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == first[0]


def test_programs_are_of_all_wrappers_and_a_quarter_each_of_the_dtypes():
    programs = [generate(0, i) for i in range(80)]
    assert {p.wrapper for p in programs} == set(WRAPPERS)
    for k, dtype in enumerate(DTYPES[:3]):
        kinds = {i.dtype for p in programs[k::4] for i in p.inputs if i.is_float}
        assert kinds == {dtype}
    assert {p.jitted for p in programs} == {True, False}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("wrapper", [w for w in WRAPPERS if w != "vmap"])
def test_right_programs_pass(wrapper):
    assert check(_program("jnp.sin(x0)", "r0 * 3.0 + x0", wrapper=wrapper)) is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_wrong_rule_is_found(wrong_sin, dtype):
    failure = check(_program("jnp.sin(x0)", dtype=dtype))
    assert failure is not None and failure.kind == "value"


def test_a_wrong_rule_is_shrunk_to_its_statement(wrong_sin):
    program = _program(
        "x0 * 2.0", "jnp.exp(x0)", "r0 + x0", "jnp.sin(r2)", "r3 - 1.0", "r4 * r1", wrapper="scan"
    )
    failure = check(program)
    assert failure is not None
    small, found = shrink(program, failure)
    assert [s.source.partition("(")[0] for s in small.statements] == ["jnp.sin"]
    assert small.wrapper == "plain" and not small.jitted and found.kind == "value"
    assert len(small.inputs) == 1 and "jnp.sin(x" in small.code()


def test_an_exception_is_a_failure(monkeypatch):
    def rule(ctx, x, **params):
        raise RuntimeError("on purpose")

    replace_rule(monkeypatch, lax.sin_p, rule)
    failure = check(_program("jnp.sin(x0)", "r0 * 2"))
    assert failure is not None and failure.kind == "raises"
    small, _ = shrink(_program("jnp.sin(x0)", "r0 * 2"), failure)
    assert len(small.statements) == 1


def test_a_result_of_another_dtype_is_a_failure(monkeypatch):
    def rule(ctx, x, **params):
        return ctx.bind(ctx.dequantise(x), **params)

    replace_rule(monkeypatch, lax.sin_p, rule)
    failure = check(_program("jnp.sin(x0)", dtype="float16"))
    assert failure is not None


def test_what_cancels_is_not_compared_to_its_last_digit():
    assert check(_program("x0 + 1e6", "r0 - 1e6")) is None
    assert check(_program("jnp.floor(x0 * 3.0 - 1.5)", dtype="float16")) is None


def test_code_of_a_program_runs(capsys):
    exec(_program("jnp.sin(x0)").code(), {})  # noqa: S102
    got, expected = capsys.readouterr().out.split("expected")
    assert got.split("(", 1)[1].strip() == expected.split("(", 1)[1].strip()


def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ran = []
    monkeypatch.setattr(command, "CHUNK", 2)
    monkeypatch.setattr(command, "check", lambda program: ran.append(program))
    options = argparse.Namespace(programs=4, seed=0, workers=1, shard=0, steps=False)
    command.run_shard(tmp_path, options)
    assert len(ran) == 4
    (tmp_path / "chunk2-4.json").unlink()
    command.run_shard(tmp_path, options)
    assert len(ran) == 6


def _training(**lines):
    x0 = Input("x0", np.array([0.5, -1.0, 2.0, 0.25]), "float32", np.asarray(1.0))
    loss = Program((x0,), (Statement("r0", "jnp.square(x0)", "float32"),), ("r0",), "grad", True)
    simplest = {name: of_name[0] for name, of_name in steps.LINES.items()}
    return steps.Training(loss, {**simplest, **lines})


@pytest.mark.sampled(16)
@pytest.mark.parametrize("start", range(0, 48, 3))
def test_random_trainings(start):
    failed = []
    for index in range(start, start + 3):
        training = steps.generate_training(SEED, index)
        try:
            failure = steps.check_training(training)
        except Discarded:
            continue
        if failure is not None:
            found = steps.shrink_training(training, failure)
            failed.append(command.report(SEED, index, *found))
    assert not failed, "\n".join(failed)


def test_a_training_depends_on_its_seed_and_index_only():
    first = [steps.generate_training(0, i).code() for i in (3, 4)]
    assert [steps.generate_training(0, i).code() for i in (4, 3)] == first[::-1]


def test_a_right_training_passes():
    adam = {"m": "0.9 * m + 0.1 * g", "v": "0.99 * v + 0.01 * g * g"}
    assert steps.check_training(_training(**adam, u="m / (jnp.sqrt(v) + 1e-3)")) is None


def test_a_scale_that_grows_is_found_and_its_cause(monkeypatch):
    def rule(ctx, x, y, **params):
        """Right numbers, at a scale that is one octave larger at every step."""
        data = ctx.bind(ctx.dequantise(x), ctx.dequantise(y), **params)
        scale = 2 * x.scale
        return ScaledArray(data / scale, scale)

    replace_rule(monkeypatch, lax.sub_p, rule)
    training = _training(
        m="0.9 * m + 0.1 * g", w="0.999 * w - 0.01 * u", g="jnp.clip(g, -1.0, 1.0)"
    )
    failure = steps.check_training(training)
    assert failure is not None and failure.kind == "scale"
    small, found = steps.shrink_training(training, failure)
    assert found.kind == "scale" and small.lines["g"] == "g" and small.lines["m"] == "m"
    assert "jsa.scalify(g)" in small.code()


def test_code_of_a_training_runs(capsys):
    exec(_training().code(), {})  # noqa: S102
    assert capsys.readouterr().out.count("expected") == 4
