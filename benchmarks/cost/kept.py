"""What training steps keep for their backward pass, in bfloat16 and in FP8: memory and bytes.

    python -m benchmarks.cost.kept                                # 4 layers on an H100: 20 minutes
    python -m benchmarks.cost.kept --targets h100 v5p --layers 4 12 --models llama

Needs the plugins of the targets, as `make accelerators` does, and no device. A GPT and a Llama of
width 1,024 see 4 sequences of 1,024 tokens; the optimizer is AdamW. `docs/fp8.md` has the figures.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen

import jax_scalify as jsa
from benchmarks.cost.decoder import SIZES, make_decoder
from benchmarks.cost.flax_models import GptSizes, make_gpt
from benchmarks.cost.training import Model, Step, plain_step, scaled_step

SEQUENCES = 4
POLICIES = {
    "none": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "fp8": jsa.checkpoint_policies.fp8_operands_and_dots,
    "fp8-only": jsa.checkpoint_policies.fp8_operands,
}
# What is compiled: a step, and what `jax.checkpoint` keeps of a layer.
CASES = {
    "bfloat16": ("bfloat16", "none"),
    "fp8": ("fp8", "none"),
    "fp8, recompute": ("recompute", "none"),
    "bfloat16, dots saved": ("bfloat16", "dots"),
    "fp8, dots saved": ("fp8", "dots"),
    "fp8, operands and dots saved": ("fp8", "fp8"),
    "bfloat16, nothing saved": ("bfloat16", "nothing"),
    "fp8, operands saved": ("fp8", "fp8-only"),
}


def make(model: str, layers: int, policy: str) -> Model:
    """A model of some layers, rematerialised but for what a policy keeps, or not at all."""
    options = {"policy": POLICIES[policy]}
    if model == "gpt":
        remat = functools.partial(linen.remat, **options) if options["policy"] else lambda f: f
        return make_gpt(GptSizes(layers=layers, sequences=SEQUENCES), remat=remat)
    remat = functools.partial(jax.checkpoint, **options) if options["policy"] else lambda f: f
    sizes = dataclasses.replace(SIZES, layers=layers)
    return make_decoder(sizes=sizes, sequences=SEQUENCES, remat=remat)


def make_step(kind: str, model: Model, activations: str = "float16") -> Step:
    """A step in bfloat16, or in float16 with static scales and FP8 matmuls."""
    if kind == "bfloat16":
        return plain_step(model)
    dtype = getattr(jnp, activations)
    recompute = kind == "recompute"
    return scaled_step(model, fp8=True, frozen=True, recompute=recompute, activations=dtype)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile every case, and print a line of each, with ratios to bfloat16 without remat."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--targets", nargs="+", default=["h100"])
    add("--models", nargs="+", choices=("gpt", "llama"), default=("gpt", "llama"))
    add("--layers", nargs="+", type=int, default=[4])
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--activations", choices=("float16", "bfloat16"), default="float16", help="of FP8 steps")
    add("--softmax-flag", action="store_true", help="with jax_softmax_custom_jvp")
    options = parser.parse_args(arguments)
    jax.config.update("jax_softmax_custom_jvp", options.softmax_flag)
    for target in options.targets:
        for model in options.models:
            for layers in options.layers:
                base = None
                for name in options.cases:
                    kind, policy = CASES[name]
                    step = make_step(kind, make(model, layers, policy), options.activations)
                    report = jsa.numerics.compile_report(
                        step.jitted(), step.state, step.batch, target=target
                    )
                    found = report.memory.temporary / 1e6, report.bytes_moved / 1e9
                    base = base or found
                    print(
                        f"{target}, {model}, {layers} layers, {name}: {found[0]:,.0f} MB temporary "
                        f"({found[0] / base[0]:.2f}), {found[1]:.1f} GB moved "
                        f"({found[1] / base[1]:.2f})",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
