"""What rules of several families share."""
