"""The weights that an export has in FP8 are those that training multiplies in FP8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.serving import export, fp8_kernels, linear_kernels, load, to_fp8, weight_only
from jax_scalify.serving.safetensors import read

E4M3 = jnp.float8_e4m3fn
HEADS, WIDTH, LENGTH = 2, 8, 5


def linen_model(x):
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            pos = self.param("pos", nn.initializers.normal(0.5), (LENGTH, WIDTH))
            x = nn.Dense(WIDTH, name="patch")(x) + pos
            attention = nn.MultiHeadDotProductAttention(
                HEADS, bias_init=nn.initializers.normal(0.5), name="attn"
            )
            x = x + attention(x)
            x = x + nn.Dense(WIDTH, name="down")(nn.relu(nn.Dense(16, name="up")(x)))
            return nn.Dense(3, name="head")(x)

    model = Model()
    params = model.init(jax.random.key(0), x)["params"]
    return params, lambda params, x: model.apply({"params": params}, x)


def nnx_model(x):
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)

    class Model(nnx.Module):
        def __init__(self):
            normal = nnx.initializers.normal(0.5)
            self.pos = nnx.Param(normal(rngs.params(), (LENGTH, WIDTH)))
            self.attn = nnx.MultiHeadAttention(
                HEADS, WIDTH, decode=False, bias_init=normal, rngs=rngs
            )
            self.up = nnx.Linear(WIDTH, 16, rngs=rngs)
            self.down = nnx.Linear(16, WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

        def __call__(self, x):
            x = x + self.pos
            x = x + self.attn(x)
            return self.head(x + self.down(nnx.relu(self.up(x))))

    graph, params, rest = nnx.split(Model(), nnx.Param, ...)
    return params, lambda params, x: nnx.merge(graph, params, rest)(x)


def equinox_model(x):
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 5)

    class Model(eqx.Module):
        pos: jax.Array
        attn: eqx.nn.MultiheadAttention
        up: eqx.nn.Linear
        down: eqx.nn.Linear
        head: eqx.nn.Linear

        def __call__(self, x):
            x = x + self.pos
            x = x + self.attn(x, x, x)
            x = x + jax.vmap(self.down)(jax.nn.relu(jax.vmap(self.up)(x)))
            return jax.vmap(self.head)(x)

    model = Model(
        jax.random.normal(keys[0], (LENGTH, WIDTH)),
        eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[1]),
        eqx.nn.Linear(WIDTH, 16, key=keys[2]),
        eqx.nn.Linear(16, WIDTH, key=keys[3]),
        eqx.nn.Linear(WIDTH, 3, key=keys[4]),
    )
    params, rest = eqx.partition(model, eqx.is_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, rest))(x)


def t5_model(x):
    shapes = {
        "encoder": {
            "relative_attention_bias": {"weight": (9, HEADS)},
            "block_0": {
                "SelfAttention": {name: (WIDTH, WIDTH) for name in "qkvo"},
                "DenseReluDense": {"wi_0": (WIDTH, 16), "wi_1": (WIDTH, 16), "wo": (16, WIDTH)},
                "layer_norm": {"weight": (WIDTH,)},
            },
        },
        "shared": (7, WIDTH),
        "lm_head": (WIDTH, 7),
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda shape: isinstance(shape, tuple))
    rng = np.random.default_rng(3)
    params = jax.tree.unflatten(tree, [jnp.float32(rng.normal(size=s) / 2) for s in leaves])

    def apply(params, x):
        encoder = params["encoder"]
        block = encoder["block_0"]
        x = x + params["shared"][jnp.arange(LENGTH)]
        h = x * block["layer_norm"]["weight"]
        attention, mlp = block["SelfAttention"], block["DenseReluDense"]
        q, k, v = (
            (h @ attention[name]).reshape(*x.shape[:2], HEADS, WIDTH // HEADS) for name in "qkv"
        )
        distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH) + LENGTH - 1
        bias = encoder["relative_attention_bias"]["weight"][distance]
        scores = jnp.einsum("bqhd,bkhd->bqkh", q, k) + bias
        values = jnp.einsum("bqkh,bkhd->bqhd", jax.nn.softmax(scores, axis=2), v)
        x = x + values.reshape(x.shape) @ attention["o"]
        x = x + (jax.nn.gelu(x @ mlp["wi_0"]) * (x @ mlp["wi_1"])) @ mlp["wo"]
        return x @ params["lm_head"]

    return params, apply


ATTENTION = [f"attn/{name}/kernel" for name in ("key", "out", "query", "value")]
FFN = ["down/kernel", "up/kernel"]
T5 = "encoder/block_0/"
# The weights in FP8, and the modules that are not.
MODELS = {
    linen_model: ([*ATTENTION, *FFN], ["head", "patch"]),
    nnx_model: ([*ATTENTION, *FFN], ["head"]),
    equinox_model: (
        [
            *(f"attn/{name}_proj/weight" for name in ("key", "output", "query", "value")),
            *("down/weight", "up/weight"),
        ],
        ["head"],
    ),
    t5_model: (
        [f"{T5}DenseReluDense/{name}" for name in ("wi_0", "wi_1", "wo")]
        + [f"{T5}SelfAttention/{name}" for name in "koqv"],
        ["lm_head"],
    ),
}


@functools.cache
def made(make):
    """A model's scaled parameters, function, input, and its logits with rounded weights."""
    x = jnp.float32(np.random.default_rng(1).normal(size=(2, LENGTH, WIDTH)))
    params, apply = make(x)
    params = jsa.as_scaled_array(params, "rms", dtype=jnp.float32)
    first = make is equinox_model  # `weight @ x`
    formats = (E4M3, jnp.float32) if first else (jnp.float32, E4M3)
    forward = jax.jit(jsa.scalify(jsa.fp8_matmuls(apply, forward_dtype=formats)))
    return params, apply, x, jsa.asarray(forward(params, x), jnp.float32)


def narrow_paths(card):
    return sorted(e["path"] for e in card["tensors"].values() if e["dtype"] == "float8_e4m3fn")


@pytest.mark.parametrize("layout", ["jax", "torch"])
@pytest.mark.parametrize("make", MODELS)
def test_logits_are_those_of_the_training_forward(tmp_path, make, layout):
    params, apply, x, trained = made(make)
    path = tmp_path / "model.safetensors"
    card = export(params, path, format="fp8", dtype=jnp.float32, layout=layout)
    narrow, wide = MODELS[make]
    assert narrow_paths(card) == narrow
    assert card["quantization_config"]["ignore"] == wide
    size = float(jnp.abs(trained).max())
    served = jax.jit(weight_only(apply, jnp.float32))(load(path, params), x)
    np.testing.assert_allclose(served, trained, rtol=0, atol=3e-6 * size)
    plain = apply(jsa.asarray(params), x)
    assert jnp.abs(plain - trained).max() > 1e-3 * size, "the weights have been rounded"


@pytest.mark.parametrize("make", MODELS)
def test_names_and_a_trace_select_the_same(make):
    params, apply, x, _ = made(make)
    select = fp8_kernels(jsa.fp8_matmuls(apply), params, x)
    assert jax.tree.all(jax.tree.map(np.array_equal, to_fp8(params, select), to_fp8(params)))


def test_a_trace_follows_the_predicate_of_training(tmp_path):
    params, apply, x, _ = made(linen_model)
    fp8 = jsa.fp8_matmuls(apply, jsa.fp8.skip("attn", "up"))
    card = export(params, tmp_path / "x", format="fp8", select=fp8_kernels(fp8, params, x))
    assert narrow_paths(card) == ["down/kernel", "head/kernel", "patch/kernel"]
    wide = [f"attn.{name}" for name in ("key", "out", "query", "value")]
    assert card["quantization_config"]["ignore"] == [*wide, "up"]
    tied = jsa.fp8_matmuls(lambda w, x: (x @ w) @ w.T, lambda m: m.sizes[1] == 3)
    assert not fp8_kernels(tied, jnp.ones((2, 3)), jnp.ones((4, 2)))("", jnp.ones((2, 3)))
    with pytest.raises(TypeError, match="`fun` must be callable, got int"):
        fp8_kernels(1, params)


# Of leaves that training multiplies, whether FP8 training does so in FP8.
NAMES = """
block/mlp/gate/kernel block/mlp/gate_proj/kernel encoder/wi_0/kernel attn/wq layers/0/q_proj/w_q
decoder/attention/query/kernel multi_head_attention/out/kernel rnn/weight_hh token_mixer/up/weight
-token_embedding/weight -wte/weight -transformer/wpe/w -patch/kernel -patch_embed/proj/kernel
-embedder/linear/kernel -moe/gate/kernel -router/kernel -lm_head/kernel -score_head/kernel
-head_1/kernel -mlm_head/dense/kernel -logits/kernel -embed_tokens/weight -unembed/w
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_training_and_export_read_names_alike(name):
    *parents, last = path = name.removeprefix("-").split("/")
    weight, x = jnp.ones((2, 2)), jnp.ones((1, 2))
    assert linear_kernels("/".join(path), weight) is not name.startswith("-")
    seen = []

    def select(matmul):
        seen.append(jsa.fp8.hidden_layers(matmul))
        return seen[-1]

    tree = functools.reduce(lambda tree, key: {key: tree}, reversed(parents), {last: weight})
    jsa.fp8_matmuls(lambda p, x: x @ jax.tree.leaves(p)[0], select)(tree, x)
    assert seen == [not name.startswith("-")]


def test_leaves_of_matmuls():
    kernels = {
        "query/kernel": (8, 2, 4),
        "attn/out/kernel": (2, 4, 8),
        "attn/qkv/kernel": (8, 3, 2, 4),
        "layers/attn/query/kernel": (3, 8, 2, 4),
        "layers/attn/out/kernel": (3, 2, 4, 8),
        "layers/up/kernel": (3, 8, 4),
        "layers/up/weight": (3, 32, 32),
        "moe/experts/up": (3, 8, 4),
        "layers/moe/w1": (3, 4, 8, 4),
        "block/conv1/kernel": (1, 1, 8, 4),
        "block/conv1/weight": (8, 4, 1, 1),
        "convnext/up/kernel": (8, 4),
        "vae/mean/weight": (8, 4),
        "pos_proj/weight": (8, 4),
    }
    others = {
        "pos": (5, 8),
        "pos_embedding": (1, 5, 8),
        "cls": (1, 1, 8),
        "probe": (1, 1, 8),
        "query/bias": (2, 4),
        "attn/bq": (2, 4),
        "relative_attention_bias/weight": (32, 2),
        "shared": (10, 8),
        "tokens/weight": (10, 8),
        "tok_emb": (10, 8),
        "wte/embedding": (10, 8),
        "A_log": (8, 4),
        "up/bias": (8,),
        "up/kernel": (8,),
        "Conv_0/kernel": (3, 8, 4),
        "stem/kernel": (3, 3, 8, 4),
        "out/kernel": (3, 3, 8, 4),
        "layers/0/weight": (8, 4, 3),
        "layers/1/weight": (8, 4, 3, 3),
    }
    for path, shape in kernels.items():
        assert linear_kernels(path, jnp.ones(shape)), path
    for path, shape in others.items():
        assert not linear_kernels(path, jnp.ones(shape)), path


@pytest.mark.parametrize("axis", [None, -1, (1, 2)])
def test_attention_kernels_are_matrices_of_pytorch(tmp_path, axis):
    """`x @ weight.T + bias` of the file is what the layer of Flax computes."""
    nn = pytest.importorskip("flax.linen")
    x = np.float32(np.random.default_rng(0).normal(size=(3, 2, 4)))
    layers = {
        "query": nn.DenseGeneral((2, 4), axis=-1, bias_init=nn.initializers.normal()),
        "out": nn.DenseGeneral(5, axis=(-2, -1), bias_init=nn.initializers.normal()),
        "qkv": nn.DenseGeneral((3, 2, 4), axis=-1, bias_init=nn.initializers.normal()),
    }
    inputs = {"query": x.reshape(3, 8), "out": x, "qkv": x.reshape(3, 8)}
    params = {n: layer.init(jax.random.key(0), inputs[n])["params"] for n, layer in layers.items()}
    axes = {"query": axis, "out": None if axis is None else -1, "qkv": axis}
    if axis == (1, 2):
        axes["qkv"] = (1, 2, 3)
    small = to_fp8(
        {
            n: {**p, "kernel": jsa.as_scaled_array(p["kernel"], "rms", axis=axes[n])}
            for n, p in params.items()
        }
    )
    path = tmp_path / "x"
    card = export(small, path, format="fp8", layout="torch", dtype=jnp.float32)
    assert card["quantization_config"]["config_groups"]["group_0"]["targets"] == ["Linear"]
    arrays = read(path)[0]
    shapes = {"query": (8, 8), "out": (5, 8), "qkv": (24, 8)}
    for name, layer in layers.items():
        weight, scale = arrays[f"{name}.weight"], arrays[f"{name}.weight_scale"]
        assert weight.shape == shapes[name]
        assert scale.shape == ((1,) if axis is None else (weight.shape[0], 1))
        got = x.reshape(3, 8) @ (np.float32(weight) * scale).T + arrays[f"{name}.bias"]
        want = layer.apply({"params": jsa.asarray(small[name], jnp.float32)}, inputs[name])
        np.testing.assert_allclose(got, want.reshape(3, -1), rtol=1e-5, atol=1e-5)
    export(small, tmp_path / "y", format="scaled", layout="torch")
    for again in (load(path), load(path, small), load(tmp_path / "y")):
        assert jax.tree.structure(again) == jax.tree.structure(small)
        for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(small), strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype
            assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_the_card_names_modules(tmp_path):
    ones = jnp.ones((4, 4))
    params = {
        "pos": ones,
        "kernel": ones,
        "up": {"kernel": ones, "bias": jnp.ones(4), "steps": jnp.ones((2, 2), jnp.int32)},
        "attn": {"wq": ones, "wo": ones, "query": {"bias": jnp.ones((2, 2))}},
        "wte": {"embedding": ones},
        "lm_head": {"kernel": ones},
    }
    select = lambda path, leaf: path in ("up/kernel", "up/bias", "attn/wq")  # noqa: E731
    config = export(params, tmp_path / "x", format="fp8", select=select)["quantization_config"]
    assert config["ignore"] == ["attn.wo", "lm_head"]
    params["up"]["kernel"] = jsa.as_scaled_array(ones, axis=-1)
    config = export(params, tmp_path / "y", format="fp8")["quantization_config"]
    targets = {n: group["targets"] for n, group in config["config_groups"].items()}
    assert targets == {"group_0": ["up"], "group_1": ["attn.wo", "attn.wq"]}
    assert config["ignore"] == ["lm_head"]
    stacked = {"layers": {"up": {"kernel": jsa.as_scaled_array(jnp.ones((3, 4, 4)), axis=0)}}}
    config = export(stacked, tmp_path / "z", format="fp8")["quantization_config"]
    assert config["config_groups"]["group_0"]["targets"] == ["layers.up"]
    assert load(tmp_path / "z")["layers"]["up"]["kernel"].scale.shape == (3, 1, 1)


def test_what_has_no_matrix_of_pytorch(tmp_path):
    kernel = ScaledArray(jnp.ones((8, 2, 4)), jnp.ones((8, 1, 1)))
    with pytest.raises(ValueError, match=r"'query/kernel' has scales .* axis=\(1, 2\)\)` makes"):
        export({"query": {"kernel": kernel}}, tmp_path / "x", format="fp8", layout="torch")
    stacked = {"layers": {"attn": {"query": {"kernel": jnp.ones((3, 8, 2, 4))}}}}
    with pytest.raises(ValueError, match="'layers/attn/query/kernel' holds a stack of kernels"):
        export(stacked, tmp_path / "x", layout="torch")
