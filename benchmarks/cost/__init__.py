"""Time, memory and size of compiled steps."""
