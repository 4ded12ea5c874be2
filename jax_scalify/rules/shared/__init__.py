"""Functions that the rules of several families share."""
