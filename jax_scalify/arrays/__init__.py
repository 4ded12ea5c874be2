"""`ScaledArray`."""
