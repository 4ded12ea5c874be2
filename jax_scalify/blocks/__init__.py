"""Block formats, in which a block of elements shares a scale: numbers, arrays, storage, matmuls."""
