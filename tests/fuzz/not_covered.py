"""Public functions without a statement in the catalogue, with the reason."""

from __future__ import annotations

_REASONS = {
    "takes no floats": (
        "jnp: bitwise_and bitwise_count bitwise_invert bitwise_left_shift bitwise_not bitwise_or "
        "bitwise_right_shift bitwise_xor gcd invert lcm left_shift right_shift packbits unpackbits "
        "ravel_multi_index unravel_index",
        "lax: bitwise_and bitwise_not bitwise_or bitwise_xor clz mulhi population_count reduce_and "
        "reduce_or reduce_xor shift_left shift_right_arithmetic shift_right_logical",
    ),
    "makes arrays of shapes and indices": (
        "jnp: diag_indices diag_indices_from empty indices ix_ mask_indices tril_indices "
        "tril_indices_from triu_indices triu_indices_from",
        "lax: broadcasted_iota empty iota",
    ),
    "is about types and shapes": (
        "jnp: broadcast_shapes can_cast einsum_path isdtype isscalar issubdtype iterable ndim "
        "promote_types result_type shape size",
        "lax: broadcast_shapes conv_dimension_numbers conv_general_permutations "
        "conv_general_shape_tuple conv_shape_tuple conv_transpose_shape_tuple dtype "
        "padtype_to_pads reduce_window_shape_tuple shape_as_value",
    ),
    "prints, reads or writes": (
        "jnp: array_repr array_str from_dlpack frombuffer fromfile fromiter fromstring "
        "get_printoptions load printoptions save savez set_printoptions",
    ),
    "has a result of a shape that depends on values": ("jnp: trim_zeros",),
    "needs a mesh of devices": (
        "lax: pbroadcast pcast precv psend ragged_all_to_all with_sharding_constraint "
        "psum_scatter_start stage",
    ),
    "is about tokens": ("lax: after_all create_token",),
    "is the resolution of a dtype, which the reference does not have": (
        "jnp: nextafter spacing",
        "lax: nextafter",
    ),
    "draws random numbers": ("lax: rng_bit_generator rng_uniform",),
    "multiplies blocks with scales of their own, on some accelerators": (
        "jax.nn: get_scaled_dot_general_config scaled_dot_general scaled_matmul",
        "lax: scaled_dot",
    ),
}

NOT_COVERED: dict[tuple[str, str], str] = {
    (row.split(": ")[0], name): reason
    for reason, rows in _REASONS.items()
    for row in rows
    for name in row.split(": ")[1].split()
}
