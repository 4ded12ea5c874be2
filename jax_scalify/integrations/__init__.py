"""Training loops of other libraries, each in a module that is imported by its own name."""
