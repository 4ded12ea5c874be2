"""How state is stored: names, scales in one byte, placement on devices."""
