"""What tests of both of Flax's interfaces share."""

import flax.linen
import flax.nnx


def copy_into(model, params):
    """Give an NNX model the parameters of a linen one."""
    state = flax.nnx.to_pure_dict(flax.nnx.state(model, flax.nnx.Param))
    plain = flax.linen.meta.unbox(params)
    if "layers" in plain:
        state["layers"] = plain["layers"]
    else:
        state["layers"] = {i: plain[f"layers_{i}"] for i in state["layers"]}
    state |= {name: plain[name] for name in ("embed", "readout") if name in plain}
    full = flax.nnx.state(model, flax.nnx.Param)
    flax.nnx.replace_by_pure_dict(full, state)
    flax.nnx.update(model, full)
