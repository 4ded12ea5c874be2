"""Rules of equations that hold a jaxpr: calls, loops, branches."""
