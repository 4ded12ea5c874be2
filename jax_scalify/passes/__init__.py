"""Passes over a jaxpr before it is interpreted, or beside that."""
