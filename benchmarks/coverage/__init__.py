"""Which primitives `scalify` handles rightly."""
