"""Programs of other libraries, a file each: a training problem, and if need be its own `train`."""
