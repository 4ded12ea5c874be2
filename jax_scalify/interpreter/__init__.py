"""How a traced function is interpreted on scaled values."""
