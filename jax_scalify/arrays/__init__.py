"""`ScaledArray`, and what trees of them become."""
