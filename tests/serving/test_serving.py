"""Files of weights: every bit, and what a reader that knows nothing of us makes of them."""

import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.serving import (
    export,
    input_scales,
    linear_kernels,
    load,
    read_card,
    to_fp8,
    weight_only,
)
from jax_scalify.serving.safetensors import write

E4M3 = jnp.float8_e4m3fn


def independent(path):
    """The tensors of a file in float64, by the descriptions of the format and of E4M3."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert not length % 8
    header.pop("__metadata__")
    bits = np.arange(256)
    sign, exponent, mantissa = np.where(bits & 128, -1.0, 1.0), (bits >> 3) & 15, bits & 7
    e4m3 = (
        sign
        * np.where(exponent, 1 + mantissa / 8, mantissa / 8)
        * 2.0 ** (np.maximum(exponent, 1) - 7.0)
    )
    e4m3[(bits & 127) == 127] = np.nan
    plain = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "BOOL": "?", "F64": "<f8"}
    tensors, used = {}, []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        used.append((begin, end))
        part = np.frombuffer(raw[8 + length + begin : 8 + length + end], np.uint8)
        if entry["dtype"] == "BF16":
            values = (part.view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F8_E4M3":
            values = e4m3[part]
        else:
            values = part.view(plain[entry["dtype"]])
        tensors[name] = values.astype(np.float64).reshape(entry["shape"]), entry["dtype"]
    used.sort()
    assert [b for b, _ in used] == [0, *[e for _, e in used]][:-1], "no gaps, no overlaps"
    assert used[-1][1] == len(raw) - 8 - length
    return tensors


def bits(x):
    return np.asarray(x).tobytes()


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape and bits(g) == bits(e)


def every_leaf():
    patterns = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    half = np.arange(2**16, dtype=np.uint16).view(np.float16)
    return {
        "narrow": {
            "kernel": ScaledArray(jnp.asarray(patterns.reshape(16, 16)), jnp.float32(2e-12))
        },
        "half": ScaledArray(jnp.asarray(half), jnp.float32(2.0**40)),
        "rows": ScaledArray(jnp.ones((2, 3), jnp.bfloat16), jnp.float32([[2.0**-40], [4]])),
        "static": ScaledArray(jnp.ones((2, 2), jnp.float8_e5m2), 2.0**-40),
        "zero": ScaledArray(jnp.zeros(3), jnp.float32(0)),
        "empty": ScaledArray(jnp.zeros((0, 3), jnp.float16), jnp.float32(0)),
        "rank 0": ScaledArray(jnp.float16(0.3), jnp.float32(1)),
        "plain": (jnp.arange(3), jnp.float32(1.5), jnp.array([True, False])),
    }


def test_every_bit_comes_back(tmp_path):
    params = every_leaf()
    params["narrow"]["kernel"] = ScaledArray(params["narrow"]["kernel"].data, jnp.float32(2.0**-39))
    for layout in ("jax", "torch"):
        path = tmp_path / f"{layout}.safetensors"
        card = export({**params, "f": len, "none": None}, path, format="scaled", layout=layout)
        got = load(path)
        assert got["plain"].keys() == {"0", "1", "2"}
        assert_same(got | {"plain": tuple(got["plain"].values())}, params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        assert_same(load(path, like=zeros), params)
        assert card == read_card(path)
        assert card["parameters"] == jsa.tree.size(params) and card["versions"]["jax"]
        independent_names = {"narrow.weight" if layout == "torch" else "narrow.kernel"}
        assert independent_names < set(card["tensors"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16"])
def test_plain_formats(tmp_path, format):
    rng = np.random.default_rng(0)
    w = ScaledArray(jnp.asarray(rng.normal(size=(8, 4)), jnp.float16), jnp.float32(2.0**-6))
    params = {"layer": {"kernel": w, "bias": jnp.float32(rng.normal(size=4))}, "n": jnp.int32(3)}
    card = export(params, tmp_path / "x", format=format, layout="torch")
    tensors = independent(tmp_path / "x")
    exact = np.float64(w.data) * 2.0**-6
    expected = exact.astype(jnp.dtype(format)).astype(np.float64).T
    np.testing.assert_array_equal(tensors["layer.weight"][0], expected)
    np.testing.assert_array_equal(
        tensors["layer.bias"][0], np.asarray(params["layer"]["bias"]).astype(jnp.dtype(format))
    )
    assert tensors["n"] == (3, "I32")
    assert card["tensors"]["layer.weight"]["dtype"] == format
    restored = load(tmp_path / "x", like=params)["layer"]["kernel"]
    np.testing.assert_array_equal(jsa.asarray(restored, jnp.float32), expected.T)


def test_what_float16_does_not_hold(tmp_path):
    large = {"a": {"w": ScaledArray(jnp.ones(2, jnp.float16), jnp.float32(2.0**17))}}
    with pytest.raises(ValueError, match="'a/w' has elements up to 1.31e\\+05, which float16 does"):
        export(large, tmp_path / "x", format="float16")
    assert not list(tmp_path.iterdir())
    small = ScaledArray(jnp.asarray([1, 0, 2.0**9, np.inf, np.nan], jnp.float16), 2.0**-27)
    card = export({"w": small}, tmp_path / "x", format="float16")
    assert card["tensors"]["w"]["flushed"] == 1
    export({"w": small}, tmp_path / "y", format="bfloat16")
    beyond = {"w": ScaledArray(jnp.ones(2, jnp.float16) * 1e4, jnp.float32(2.0**126))}
    with pytest.raises(ValueError, match="up to 8.51e\\+41, which float32 does not hold"):
        export(beyond, tmp_path / "z", format="float32")


@pytest.mark.sampled(16)
@pytest.mark.parametrize("axis", [None, -1])
def test_logits_of_an_independent_reader(tmp_path, axis):
    """FP8 weights of an unmodified Flax model, as the matmuls of the training step round them."""
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="lm_head")(nn.relu(nn.Dense(16, name="up")(x)))

    model, x = Model(), np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)
    params = model.init(jax.random.key(0), x)["params"]
    kernel = jsa.as_scaled_array(params["up"]["kernel"], "rms", dtype=jnp.float16, axis=axis)
    params = jsa.as_scaled_array(params, "rms", dtype=jnp.float32) | {}
    params["up"] = {**params["up"], "kernel": kernel}
    card = export(params, tmp_path / "x", format="fp8", dtype=jnp.float32, layout="torch")
    tensors = {name: values for name, (values, _) in independent(tmp_path / "x").items()}
    assert tensors["up.weight"].shape == (16, 8) and card["tensors"]["up.weight"]["saturated"] == 0
    assert tensors["up.weight_scale"].shape == ((1,) if axis is None else (16, 1))
    hidden = x @ (tensors["up.weight"] * tensors["up.weight_scale"]).T + tensors["up.bias"]
    logits = np.maximum(hidden, 0) @ tensors["lm_head.weight"].T + tensors["lm_head.bias"]

    # Of the step's forward pass, with FP8 weights; of the file, by data and scale, and by one line.
    def apply(params, x):
        return model.apply({"params": params}, x)

    formats = (jnp.float32, E4M3)
    select = jsa.fp8.all_of(jsa.fp8.linear_layers, jsa.fp8.skip_head)
    forward = jax.jit(jsa.scalify(jsa.fp8_matmuls(apply, select, forward_dtype=formats)))
    trained = jsa.asarray(forward(params, x), jnp.float32)
    served = jax.jit(weight_only(apply, jnp.float32))(load(tmp_path / "x"), x)
    size = np.abs(logits).max()
    np.testing.assert_allclose(trained, logits, rtol=0, atol=3e-6 * size)
    np.testing.assert_allclose(served, logits, rtol=0, atol=3e-6 * size)
    plain = model.apply({"params": jsa.asarray(params)}, x)
    assert np.abs(plain - logits).max() > 1e-3 * size, "the weights have been rounded"

    # What was trained in FP8 goes on as it was, bit for bit.
    fp8 = jax.jit(jsa.scalify(jsa.fp8_matmuls(apply, select)))
    assert_same(fp8(load(tmp_path / "x", like=params), x), fp8(params, x))
    config = card["quantization_config"]
    assert config["ignore"] == ["lm_head"]
    strategy = config["config_groups"]["group_0"]["weights"]["strategy"]
    assert strategy == ("tensor" if axis is None else "channel")


def rounded_to_e4m3(x):
    """To nearest, of two as near the one with an even mantissa; saturating."""
    bits = np.arange(127)
    table = np.where(bits >> 3, 1 + (bits & 7) / 8, (bits & 7) / 8) * 2.0 ** (
        np.maximum(bits >> 3, 1) - 7.0
    )
    size = np.minimum(np.abs(x), 448)
    above = np.minimum(np.searchsorted(table, size), 126)
    below = np.maximum(above - 1, 0)
    far, near = table[above] - size, size - table[below]
    chosen = np.where((far < near) | ((far == near) & (above % 2 == 0)), above, below)
    return np.sign(x) * table[chosen]


def test_logits_with_activations_in_fp8(tmp_path):
    """At static scales that nobody has measured: those which training propagates."""
    rng = np.random.default_rng(2)
    shapes = {"up": (8, 16), "down": (16, 4)}
    params = {
        name: {
            "kernel": jsa.as_scaled_array(
                jnp.asarray(rng.normal(size=s)) / 4, "rms", dtype="float16"
            ),
            "bias": jsa.as_scaled_array(jnp.float32(rng.normal(size=s[1]))),
        }
        for name, s in shapes.items()
    }
    x = np.float32(rng.normal(size=(5, 8)))

    def apply(params, x):
        for name in shapes:
            x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"])
        return x

    scales = input_scales(apply, params, jsa.as_scaled_array(x, scale=2.0))
    assert scales.keys() == {"up/kernel", "down/kernel"} and scales["up/kernel"] == 2
    options = dict(format="fp8", dtype=jnp.float32, layout="torch", input_scales=scales)
    card = export(params, tmp_path / "x", **options)
    tensors = {name: values for name, (values, _) in independent(tmp_path / "x").items()}
    logits = np.float64(x)
    for name in shapes:
        scale = tensors[f"{name}.input_scale"]
        assert scale.shape == (1,) and scale == scales[f"{name}/kernel"]
        product = rounded_to_e4m3(logits / scale) @ tensors[f"{name}.weight"].T
        logits = product * scale * tensors[f"{name}.weight_scale"] + tensors[f"{name}.bias"]
        logits = np.maximum(logits, 0)
    fp8 = jsa.fp8_matmuls(apply, accumulation_dtype=jnp.float32)
    trained = jax.jit(jsa.scalify(fp8))(params, jsa.as_scaled_array(x, scale=2.0))
    np.testing.assert_allclose(
        jsa.asarray(trained), logits, rtol=0, atol=3e-6 * np.abs(logits).max()
    )
    activations = card["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    assert activations["strategy"] == "tensor" and activations["dynamic"] is False
    assert load(tmp_path / "x").keys() == params.keys()
    assert load(tmp_path / "x")["up"].keys() == params["up"].keys()
    with pytest.raises(ValueError, match="`input_scales` has none for 'down/kernel'"):
        export(params, tmp_path / "y", format="fp8", input_scales={"up/kernel": 1.0})
    # In loops and under `fp8_matmuls` too; of stacked layers the largest.
    stacked = {"w": jsa.as_scaled_array(jnp.ones((3, 4, 4)) / 4, "rms", axis=0)}
    loop = lambda p, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]  # noqa: E731
    assert input_scales(jsa.fp8_matmuls(loop), stacked, jnp.ones((2, 4))).keys() == {"w"}


def test_fp8_is_not_rounded_again(tmp_path):
    params = to_fp8(
        {"a": {"kernel": jsa.as_scaled_array(jnp.float32([[0.3, 448 * 3], [-1, 2**-9]]))}}
    )
    np.testing.assert_array_equal(
        np.asarray(params["a"]["kernel"].data, np.float32), [[0.3125, 448], [-1, 2**-9]]
    )
    assert_same(to_fp8(params), params)
    first = export(
        {"a": {"kernel": jnp.float32([[0.3, 448 * 3], [-1, 2**-9]])}}, tmp_path / "x", format="fp8"
    )
    assert first["tensors"]["a.kernel"]["saturated"] == 0  # by RMS it fits
    export(params, tmp_path / "y", format="fp8")
    assert_same(load(tmp_path / "y"), params)
    zero = {"a": {"kernel": jsa.as_scaled_array(jnp.zeros((2, 2)))}}
    export(zero, tmp_path / "z", format="fp8")
    assert independent(tmp_path / "z")["a.kernel_scale"][0] == 1


def test_which_weights_are_linear():
    w = jnp.ones((2, 2))
    for path in ("up/kernel", "layers/0/attention/query/kernel", "params/up/w", "h.0/c_fc/weight"):
        assert linear_kernels(path, w), path
    for path in ("lm_head/kernel", "head/kernel", "embed/kernel", "tokens/embedding", "up/bias"):
        assert not linear_kernels(path, w), path
    assert not linear_kernels("up/kernel", jnp.ones(2))


def test_nnx_and_single_arrays(tmp_path):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    state = jsa.as_scaled_array(nnx.state(model), "rms", dtype=jnp.float16)
    card = export(state, tmp_path / "x", format="scaled", layout="torch")
    assert set(card["tensors"]) == {"weight", "bias"}
    assert load(tmp_path / "x")["kernel"].dtype == jnp.float16
    assert_same(load(tmp_path / "x", like=jax.tree.map(jnp.zeros_like, state)), state)
    assert list(export(state, tmp_path / "y", format="fp8")["tensors"]) == ["bias", "kernel"]
    export(state["kernel"].get_value(), tmp_path / "z", format="scaled")
    assert_same(load(tmp_path / "z"), state["kernel"].get_value())
    assert_same(load(tmp_path / "z", like=load(tmp_path / "z")), state["kernel"].get_value())


def test_weights_that_lie_as_those_of_pytorch(tmp_path):
    """Equinox has output features first: so are its scales."""
    w = jsa.as_scaled_array(jnp.float32([[1, 2], [16, 32], [3, 4]]), "rms", axis=0)
    for layout in ("jax", "torch"):
        params = {"layers": [{"weight": w}]}
        export(params, tmp_path / layout, format="fp8", layout=layout)
        tensors = independent(tmp_path / layout)
        assert tensors["layers.0.weight_scale"][0].shape == (3, 1)
        product = tensors["layers.0.weight"][0] * tensors["layers.0.weight_scale"][0]
        np.testing.assert_array_equal(product, w.to_array())
    columns = {"weight": jsa.as_scaled_array(jnp.ones((3, 2)), axis=1)}
    with pytest.raises(ValueError, match=r"axis=0\)` makes them"):
        export(columns, tmp_path / "x", format="fp8")


def test_other_programs(tmp_path):
    """Files that others wrote, and ours as their packages read them."""
    arrays = {"a.w": np.float32([[1, 2]]), "b": np.asarray([1, -2], ml_dtypes.bfloat16)}
    write(tmp_path / "x", arrays, {})
    got = load(tmp_path / "x")
    np.testing.assert_array_equal(got["a"]["w"], arrays["a.w"])
    like = {"a": {"w": ScaledArray(jnp.zeros((1, 2), jnp.float16), jnp.float32(1))}}
    np.testing.assert_array_equal(
        load(tmp_path / "x", like, partial=True)["a"]["w"].to_array(), [[1, 2]]
    )
    with pytest.raises(ValueError, match="has no card"):
        read_card(tmp_path / "x")


def test_the_package_safetensors_reads_it(tmp_path):
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    params = {"a": {"kernel": np.float32([[1, 2]])}, "b": np.arange(3)}
    export(params, tmp_path / "x")
    got = safetensors_numpy.load_file(tmp_path / "x")
    np.testing.assert_array_equal(got["a.kernel"], params["a"]["kernel"])
    safetensors_numpy.save_file(got, tmp_path / "y")
    np.testing.assert_array_equal(load(tmp_path / "y")["b"], params["b"])


def test_torch_reads_it(tmp_path):
    safetensors_torch = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    w = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
    export({"a": {"kernel": w}}, tmp_path / "x", format="fp8", layout="torch")
    got = safetensors_torch.load_file(tmp_path / "x")
    assert got["a.weight"].dtype == torch.float8_e4m3fn
    ours = jsa.asarray(load(tmp_path / "x"), jnp.float32)["a"]["kernel"]
    theirs = got["a.weight"].to(torch.float32) * got["a.weight_scale"]
    np.testing.assert_array_equal(theirs.numpy().T, ours)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("layout", ["jax", "torch"])
def test_weights_in_block_formats(tmp_path, layout):
    w = jax.random.normal(jax.random.key(0), (70, 5))
    formats = ("mxfp8", "mxfp4", jsa.BlockFormat("mxfp4", square=True), "nvfp4")
    params = {
        f"layer_{i}": {"kernel": jsa.as_scaled_array(w * 2.0**i, block=format)}
        for i, format in enumerate(formats)
    }
    path = tmp_path / "model.safetensors"
    export(params, path, format="scaled", layout=layout)
    for found in (load(path), load(path, like=params)):
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
            assert got.dtype == want.dtype and bool((got == want).all())
        assert jax.tree.structure(found) == jax.tree.structure(params)
    values = {name: layer["kernel"].to_array() for name, layer in params.items()}
    export(params, path, layout=layout, overwrite=True)
    for name, layer in load(path).items():
        np.testing.assert_array_equal(layer["kernel"], values[name])
    export(params, path, format="fp8", layout=layout, overwrite=True)
    for name, layer in load(path).items():
        got, want = jsa.asarray(layer["kernel"], jnp.float32), values[name]
        np.testing.assert_allclose(got, want, rtol=2**-4, atol=2**-10 * float(jnp.abs(want).max()))


def test_block_formats_that_do_not_turn(tmp_path):
    kernel = jsa.as_scaled_array(jnp.ones((3, 3, 8, 4)), block="mxfp8")
    with pytest.raises(ValueError, match="'conv/kernel' has shape .* turns matrices"):
        export({"conv": {"kernel": kernel}}, tmp_path / "a", format="scaled", layout="torch")


def test_errors(tmp_path):
    w = {"a": {"kernel": jnp.ones((2, 2))}}
    path = tmp_path / "x"
    export(w, path, rename=lambda name: f"model.{name}")
    assert list(read_card(path)["tensors"]) == ["model.a.kernel"]
    np.testing.assert_array_equal(load(path, like=w)["a"]["kernel"], 1)
    with pytest.raises(FileExistsError, match="exists; `overwrite=True` replaces it"):
        export(w, path)
    export({"b": jnp.ones(1)}, path, overwrite=True, metadata={"note": [1]})
    assert read_card(path)["metadata"] == {"note": [1]}
    for options, message in {
        ("format", "int8"): "`format` must be one of float32",
        ("layout", "tf"): "`layout` must be one of jax, torch",
    }.items():
        with pytest.raises(ValueError, match=message):
            export(w, tmp_path / "y", **dict([options]))
    with pytest.raises(ValueError, match="`select` must choose at least one leaf; there are"):
        export({"bias": jnp.ones(2)}, tmp_path / "y", format="fp8")
    with pytest.raises(ValueError, match="Two tensors have the name 'a.b'"):
        export({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}, tmp_path / "y")
    with pytest.raises(ValueError, match="'a/kernel' is a kernel of rank 3"):
        export({"a": {"kernel": jnp.ones((1, 2, 3))}}, tmp_path / "y", layout="torch")
    rows = {"a": {"kernel": jsa.as_scaled_array(jnp.ones((2, 3)), axis=0)}}
    with pytest.raises(ValueError, match=r"'a/kernel' has scales of shape \(2, 1\)"):
        export(rows, tmp_path / "y", format="fp8")
    with pytest.raises(TypeError, match="'k' must be a concrete array"):
        export({"k": jax.random.key(0)}, tmp_path / "y")
    with pytest.raises(TypeError, match="'c' is int4, which safetensors does not have"):
        export({"c": np.ones(2, ml_dtypes.int4)}, tmp_path / "y")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load(tmp_path / "z")
    for content in (b"", b"12345678", struct.pack("<Q", 2) + b"ab", struct.pack("<Q", 999) + b"{}"):
        (tmp_path / "z").write_bytes(content)
        with pytest.raises(ValueError, match="is no safetensors file"):
            load(tmp_path / "z")
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'
    (tmp_path / "z").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    with pytest.raises(ValueError, match=r"'a': bytes 0 to 4 do not hold float32\[2\]"):
        load(tmp_path / "z")
    with pytest.raises(ValueError, match="'a/v' is missing"):
        export(w, tmp_path / "y")
        load(tmp_path / "y", like={"a": {"v": jnp.ones(2)}}, partial=True)
    assert not list(tmp_path.glob("*.new"))
