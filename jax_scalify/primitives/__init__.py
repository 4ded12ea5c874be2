"""The primitives of this package, and functions with scale rules."""
