"""The interpreter: evaluate the jaxpr of a traced function on scaled values."""
