"""The scales of a trace: their algebra, as arrays, computed together."""
