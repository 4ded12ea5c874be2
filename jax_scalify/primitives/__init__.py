"""What JAX sees of us in a jaxpr: the primitives, and functions with scale rules."""
