"""`fp8_matmuls`: unmodified functions with the matmuls of `nn.dot_general`."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.base.jaxprs import all_equations

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
ALL = jsa.fp8.linear_layers
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(2, 4, 8)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32)


class Block(linen.Module):
    dot_general: object = None

    @linen.compact
    def __call__(self, x):
        attention = linen.MultiHeadDotProductAttention(
            2, qkv_dot_general=self.dot_general, out_dot_general=self.dot_general, name="attention"
        )
        dense = functools.partial(linen.Dense, dot_general=self.dot_general)
        x = x + attention(linen.LayerNorm()(x))
        return x + dense(8, name="down")(jax.nn.gelu(dense(32, name="up")(x)))


class Transformer(linen.Module):
    dot_general: object = None

    @linen.compact
    def __call__(self, x):
        for i in range(2):
            x = linen.remat(Block)(self.dot_general, name=f"block_{i}")(x)
        return linen.Dense(16, dot_general=self.dot_general, name="head")(x)


def linen_loss(dot_general=None):
    model = Transformer(dot_general)
    params = Transformer().init(jax.random.key(0), X)
    return lambda params, x: jnp.mean(model.apply(params, x) ** 2), params


class NNXModel(nnx.Module):
    def __init__(self, rngs, dot_general=lax.dot_general):
        self.up = nnx.Linear(8, 32, rngs=rngs, dot_general=dot_general)
        self.head = nnx.Linear(32, 8, rngs=rngs, dot_general=dot_general)

    def __call__(self, x):
        return self.head(jax.nn.gelu(self.up(x)))


def nnx_loss(dot_general=lax.dot_general):
    graph, params = nnx.split(NNXModel(nnx.Rngs(0), dot_general))
    return lambda params, x: jnp.mean(nnx.merge(graph, params)(x) ** 2), params


def dots(fun, *args):
    """How many matmuls have which operand dtypes."""
    equations = all_equations(jax.make_jaxpr(fun)(*args).jaxpr)
    return collections.Counter(
        tuple(v.aval.dtype.name for v in e.invars)
        for e in equations
        if e.primitive.name == "dot_general"
    )


def assert_trees_close(got, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("make", [linen_loss, nnx_loss])
def test_a_model_is_as_if_its_layers_had_been_told(make):
    loss, params = make()
    explicit, _ = make(jsa.nn.dot_general)
    of_both = [jax.value_and_grad(f) for f in (jsa.fp8_matmuls(loss, ALL), explicit)]
    assert_trees_close(*(jax.jit(f)(params, X) for f in of_both))
    scaled = jsa.as_scaled_array((params, X), scale="rms")
    assert_trees_close(*(jsa.asarray(jax.jit(jsa.scalify(f))(*scaled)) for f in of_both))


def test_all_passes_have_fp8_operands():
    loss, params = linen_loss()
    count = dots(jax.grad(jsa.fp8_matmuls(loss, ALL)), params, X)
    wide = count.pop(("float32", "float32"))
    assert sum(count.values()) + wide == sum(dots(jax.grad(loss), params, X).values())
    # What is left: scores and weighted values, twice forward (remat) and twice backward, a block.
    assert wide == 2 * 2 * 4
    everything = jsa.fp8_matmuls(loss, lambda matmul: True)
    assert dots(jax.grad(everything), params, X)[("float32", "float32")] == 0


def test_a_predicate_sees_scopes_names_and_sizes():
    seen = {}

    def select(matmul):
        seen[matmul.scope] = matmul
        return jsa.fp8.linear_layers(matmul)

    loss, params = linen_loss()
    jax.eval_shape(jsa.fp8_matmuls(loss, select), params, X)
    up = seen["Transformer/block_1/up"]
    assert up.rhs_name == "[0]['params']['block_1']['up']['kernel']" and up.lhs_name == ""
    assert up.sizes == (8, 32, 8) and up.lhs.shape == (2, 4, 8)
    scores = next(m for scope, m in seen.items() if "khd->...hqk" in scope)
    assert scores.sizes == (4, 4, 4) and scores.rhs_name == ""


@pytest.mark.parametrize("make", [linen_loss, nnx_loss])
def test_layers_are_skipped_by_name_in_every_library(make):
    loss, params = make()
    everything = dots(jsa.fp8_matmuls(loss, lambda matmul: True), params, X)
    left = dots(jsa.fp8_matmuls(loss, jsa.fp8.skip_head), params, X)
    assert left[("float32", "float32")] == 1 == sum(everything.values()) - sum(left.values()) + 1


@pytest.mark.parametrize(
    ("name", "critical"),
    [
        ("['block_0']['attention']['out']['kernel']", True),
        ("['layers']['0']['self_attn']['o_proj']['weight']", True),
        ("['h']['1']['attn']['c_proj']['kernel']", True),
        ("['feed_forward']['down']['kernel']", True),
        ("['mlp']['down_proj']['kernel']", True),
        ("['mlp']['fc2']['kernel']", True),
        ("['attention']['query']['kernel']", False),
        ("['mlp']['up_proj']['kernel']", False),
        ("['feed_forward']['gate']['kernel']", False),
        ("['head']['kernel']", False),
    ],
)
def test_critical_matmuls(name, critical):
    assert jsa.fp8.skip_critical(named(name)) is not critical


def named(name):
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return jsa.fp8.Matmul("", x, x, "", name, (((1,), (0,)), ((), ())))


def test_by_default_the_head_stays_wide():
    loss, params = linen_loss()
    narrow, wide = (
        sum(n for (kind, _), n in dots(jsa.fp8_matmuls(loss, *s), params, X).items() if "8" in kind)
        for s in ((), (ALL,))
    )
    assert narrow == wide - 1


def test_heads_and_routers_by_their_names():
    heads = (
        "head lm_head LMHead mlm_head/dense classifier_head_0 logits unembed embed_tokens "
        "embed.attend wte.attend"
    ).split()
    routers = "router router_weights SwitchRouter gating moe/gate block_sparse_moe.gate".split()
    neither = (
        "MultiHeadDotProductAttention_0/query multi_head_attention/out multihead_attn self_attn "
        "mlp/gate feed_forward/gate moe/gate_proj experts/up GPT2LMHeadModel/h_0/up "
        "EmbeddingModel/layers/0/up RouterNet/up"
    ).split()
    for name in (*heads, *routers, *neither):
        assert jsa.fp8.skip_head(named(name)) is (name not in heads), name
        assert jsa.fp8.skip_router(named(name)) is (name not in routers), name


def test_embeddings_by_their_names_stay_wide_by_default():
    embeddings = (
        "patch_embed/proj patch_embeddings.projection ViT/patches patches_0 patchify "
        "embedding/kernel transformer/wte wpe_0 tok_wte tokens/embed position_embedding"
    ).split()
    neither = (
        "moe/dispatch/up dispatches PatchTST/block_0/up patched/up newtext/up "
        "EmbeddingModel/layers/0/up block_0/attention/out"
    ).split()
    for name in (*embeddings, *neither):
        assert jsa.fp8.skip_embedding(named(name)) is (name not in embeddings), name
        assert jsa.fp8.hidden_layers(named(name)) is (name not in embeddings), name


def test_a_function_of_nothing_but_heads_warns():
    def loss(params, x):
        return jnp.sum(x @ params["head"])

    with pytest.warns(UserWarning, match=r"left all 1 linear layers wide, such as `\[0\]\['head'"):
        jsa.fp8_matmuls(loss)({"head": W}, X)
    jsa.fp8_matmuls(loss, ALL)({"head": W}, X)
    jsa.fp8_matmuls(lambda x: jnp.sum(x))(X)  # nothing to rewrite


def test_predicates():
    x, y = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 256), jnp.float32)
    matmul = jsa.fp8.Matmul("GPT/tokens", x, y, "", "", (((1,), (0,)), ((), ())))
    assert jsa.fp8.min_size(32)(matmul) and not jsa.fp8.min_size(33)(matmul)
    both = jsa.fp8.all_of(jsa.fp8.linear_layers, jsa.fp8.min_size(33))
    assert not both(matmul) and jsa.fp8.all_of()(matmul)
    assert not jsa.fp8.skip("tok")(matmul) and jsa.fp8.skip("toc")(matmul)
    assert jsa.fp8.skip_embedding(matmul)


def in_scan(w, x):
    return lax.scan(lambda h, v: (jnp.tanh(h @ v), None), x, jnp.stack([w, w]))[0]


def in_cond(w, x):
    return lax.cond(x.sum() > 0, lambda v: x @ v, lambda v: v @ v, w)


def in_while(w, x):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]


def in_fori(w, x):
    return lax.fori_loop(0, 2, lambda _, h: h @ w, x)


STRUCTURES = {
    "jit": lambda w, x: jax.jit(lambda w, x: x @ w, inline=False)(w, x),
    "scan": in_scan,
    "cond": in_cond,
    "while": in_while,
    "fori": in_fori,
    "remat": jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w),
    "vmap": lambda w, x: jax.vmap(lambda row: w @ row)(x),
    "nested": lambda w, x: jax.jit(jax.checkpoint(in_scan))(w, x),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", STRUCTURES)
def test_matmuls_in_structures(name):
    fun = STRUCTURES[name]
    plain, rewritten = dots(fun, W, W), dots(jsa.fp8_matmuls(fun), W, W)
    assert set(plain) == {("float32", "float32")}
    assert rewritten == {("float8_e4m3fn", "float8_e4m3fn"): sum(plain.values())}
    wide = jsa.fp8_matmuls(fun, forward_dtype=jnp.float32, backward_dtype=jnp.float32)
    np.testing.assert_allclose(jax.jit(wide)(W, W), fun(W, W), rtol=1e-5, atol=1e-5)
    if name == "while":
        return
    grads = [jax.grad(lambda w, f=f: f(w, W).sum()) for f in (wide, fun, jsa.fp8_matmuls(fun))]
    assert ("float32", "float32") not in dots(grads[2], W)
    np.testing.assert_allclose(grads[0](W), grads[1](W), rtol=1e-4, atol=1e-4)
    scaled = ScaledArray(W * 2.0**-10, jnp.float32(2.0**10))
    np.testing.assert_allclose(
        jax.jit(jsa.scalify(grads[0]))(scaled), grads[1](W), rtol=1e-4, atol=1e-4
    )


def test_names_reach_into_scans():
    names = []

    def select(matmul):
        names.append((matmul.lhs_name, matmul.rhs_name))
        return True

    def layers(ws, x):
        return lax.scan(lambda h, w: (h @ w.astype(jnp.float32), None), x, ws)[0]

    jax.eval_shape(jsa.fp8_matmuls(layers, select), jnp.stack([W, W]).astype(jnp.float16), W)
    assert names == [("", "[0]")]


def test_what_stays_as_it_is():
    @jax.custom_vjp
    def own(x):
        return x @ x

    own.defvjp(lambda x: (x @ x, x), lambda x, ct: (2 * ct @ x,))
    integers = jnp.ones((2, 2), jnp.int32)
    narrow = W.astype(E4M3)

    def fun(x):
        wide = lax.dot(narrow, narrow, preferred_element_type=jnp.float32)
        return own(x), integers @ integers, wide

    assert dots(jsa.fp8_matmuls(fun, lambda matmul: True), W) == dots(fun, W)
    assert_trees_close(jsa.fp8_matmuls(fun)(W), fun(W))
    np.testing.assert_array_equal(
        jax.grad(lambda x: jsa.fp8_matmuls(own)(x).sum())(W), jax.grad(lambda x: own(x).sum())(W)
    )


def test_arguments_of_all_kinds_and_closed_over_weights():
    @functools.partial(jsa.fp8_matmuls, forward_dtype=(E5M2, E4M3))
    def fun(tree, kind, *, flag=True, fn=jnp.tanh):
        assert kind == "relu" and flag is True
        return {"out": fn(tree["x"] @ W), "n": tree["n"]}

    out = fun({"x": X, "n": 3, "none": None}, "relu")
    assert out["n"] == 3 and out["out"].shape == X.shape
    assert fun.__name__ == "fun"
    count = dots(lambda x: fun({"x": x, "n": 3}, "relu")["out"], X)
    assert count == {("float8_e5m2", "float8_e4m3fn"): 1}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_result_dtypes_stay(dtype):
    x = X.astype(dtype)
    assert jsa.fp8_matmuls(lambda x: x @ W.astype(dtype))(x).dtype == dtype
    wide = jsa.fp8_matmuls(lambda x: jnp.dot(x, x[0].T, preferred_element_type=jnp.float32))(x)
    assert wide.dtype == jnp.float32


def test_shardings_of_an_inner_jit_stay():
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    inner = jax.jit(lambda x: x @ W, in_shardings=sharding, out_shardings=sharding)
    x = jnp.ones((8, 8))
    assert jax.jit(jsa.fp8_matmuls(inner))(x).sharding.is_equivalent_to(sharding, 2)


def test_refusals():
    with pytest.raises(TypeError, match="`fun` must be callable, got int"):
        jsa.fp8_matmuls(3)
    with pytest.raises(TypeError, match="`select` must be callable, got str"):
        jsa.fp8_matmuls(jnp.dot, "head")
    with pytest.raises(TypeError, match="`forward_dtype` must be floating point, got int8"):
        jsa.fp8_matmuls(jnp.dot, forward_dtype=jnp.int8)
    with pytest.raises(TypeError, match="Put `scalify` around it"):
        jsa.fp8_matmuls(jnp.dot)(jsa.as_scaled_array(W), W)


def test_a_backward_pass_inside_is_told():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    with pytest.warns(UserWarning, match="differentiate the result"):
        jsa.fp8_matmuls(jax.value_and_grad(loss))(W, X[0])
    with pytest.warns(UserWarning, match="1 matmuls of a backward pass"):
        jax.jit(jsa.scalify(jsa.fp8_matmuls(jax.jit(jax.grad(loss)))))(jsa.as_scaled_array(W), X[0])
