"""What the package costs, and what it gives: measured, stored, and written into the docs."""
