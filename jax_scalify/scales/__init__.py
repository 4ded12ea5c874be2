"""The scales of a trace: symbolic algebra, arrays, and the program that computes them together."""
