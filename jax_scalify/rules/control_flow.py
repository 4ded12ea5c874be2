"""Loops and branches, and what runs outside the program."""

from __future__ import annotations

from jax_scalify.registry import register_scale_rule
from jax_scalify.rules.mixed import dequantising_rule

for _reason, _names in (
    (
        "its body is evaluated on plain values",
        "scan while cond remat2 checkpoint remat_opt custom_linear_solve linear_call shard_map "
        "custom_vmap_call custom_partitioning call_hi_primitive run_state custom_lin stage",
    ),
    (
        "what it calls is outside the program and expects plain values",
        "pure_callback io_callback debug_callback debug_print ffi_call call_exported",
    ),
    ("a `Ref` holds plain values", "get swap addupdate freeze new_ref dce_sink"),
):
    register_scale_rule(*_names.split(), dequantises=_reason)(dequantising_rule)
