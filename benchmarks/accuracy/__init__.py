"""How well training in few bits goes."""
