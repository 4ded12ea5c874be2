"""Rules of equations that hold a function: calls, loops, branches."""
