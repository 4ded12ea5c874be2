"""The Llama of the examples: its sizes, its recipes, and what the command line refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("rich")

from examples.gpt.data import load_corpus
from examples.llama import cli
from examples.llama.layout import Layout, abstract_mesh, parse_mesh
from examples.llama.model import SIZES, Sizes, init, loss_fn
from examples.llama.plan import make_plan, plan_table
from examples.llama.step import Training
from examples.llama.train import Run

TINY = Sizes(2, 32, 4, 2, hidden=64, vocabulary=256, context=32)
ONE_DEVICE = Layout(None)


def test_sizes_are_those_that_were_published():
    found = {name: round(SIZES[name].parameters / 1e9, 1) for name in ("8b", "70b", "405b")}
    assert found == {"8b": 8.0, "70b": 70.6, "405b": 405.9}


@pytest.mark.full
def test_blocks_of_queries_and_tokens_change_nothing():
    params = init(TINY, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 33), 0, 256)
    grad = jax.jit(jax.value_and_grad(loss_fn), static_argnums=2)
    whole = grad(params, tokens, TINY)
    blocks = grad(params, tokens, dataclasses.replace(TINY, block=8))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(blocks), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def run_of(recipe, directory=None, steps=6, **options):
    training = Training(TINY, ONE_DEVICE, recipe, steps=steps)
    corpus = load_corpus(None, context=TINY.context)
    return Run(training, batch=4, seed=0, corpus=corpus, directory=directory, **options)


@pytest.mark.full
def test_recipes_train_alike_and_go_on_from_a_checkpoint(tmp_path):
    seen = []
    want = run_of("bfloat16").train(progress=lambda *x: seen.append(x))
    assert [x[0] for x in seen] == list(range(1, 7)) and want[-1] < want[0]
    whole = run_of("fp8-frozen", tmp_path, checkpoint_every=3, freeze_after=2).train()
    np.testing.assert_allclose(whole, want, rtol=2e-2)
    rest = run_of("fp8-frozen", tmp_path, checkpoint_every=3, freeze_after=2)
    assert rest.train(resume=True) == []
    for kept in (tmp_path / "checkpoints").iterdir():
        if kept.name == "6":
            kept.rename(tmp_path / "last")
    assert rest.train(resume=True) == whole[3:]


@pytest.mark.full
def test_float16_trains_like_bfloat16():
    runs = {name: run_of(name, steps=20).train() for name in ("bfloat16", "float16", "fp8")}
    np.testing.assert_allclose(runs["float16"], runs["bfloat16"], rtol=5e-3)
    np.testing.assert_allclose(runs["fp8"], runs["bfloat16"], rtol=2e-2)


@pytest.mark.full
def test_a_plan_is_made_of_shapes():
    plan = make_plan(Training(TINY, ONE_DEVICE, "fp8-frozen"), 4, None)
    assert plan.state == plan.parameters * 6 + 4 * 4 * 33 + 8  # tokens and counts besides
    assert plan.temporary > 0 and plan.fits is None
    table = plan_table("title", {"fp8-frozen": plan})
    assert table.row_count == 1


def test_a_layout_on_a_mesh():
    layout = Layout(abstract_mesh(parse_mesh("data=2,fsdp=4,tensor=2", 16)))
    assert layout.size("data", "fsdp") == 8
    training = Training(SIZES["8b"], layout, "float16")
    params, _ = training.abstract_state()
    query = params["layers"]["query"]
    assert tuple(query.data.sharding.spec) == (None, "fsdp", "tensor")
    assert query.scale.sharding.is_fully_replicated and query.data.dtype == jnp.float16
    assert params["norm"].data.sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "9b"], "`size` must be one of tiny"),
        (["--layers", "0"], "`layers` must be positive"),
        (["--size", "8b", "--context", "1000"], "a multiple of 1024"),
        (["--mesh", "model=2"], "axes of data, fsdp, tensor"),
        (["--mesh", "fsdp=0"], "positive numbers"),
        (["--mesh", "fsdp=64"], "is of 64 devices, and there are 1"),
        (["--recipe", "int8"], "`recipe` must be one of bfloat16"),
        (["--recipe", "fp8", "float16"], "must be one unless"),
        (["--batch", "0"], "`batch` must be a multiple"),
        (["--compile-only"], "needs `target`"),
        (["--compile-only", "--target", "h101"], "a100, h100, h200, b200"),
        (["--compile-only", "--target", "v5p:2x2x1"], "`mesh` has to be given"),
        (["--compile-only", "--target", "h100:16", "--mesh", "tensor=16"], "divide `groups`"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err
