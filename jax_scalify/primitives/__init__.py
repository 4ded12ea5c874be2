"""The primitives of this package. The functions that bind them are in `ops/` and `nn/`."""
