"""Conversions of a user's state: arrays to scaled arrays, static scales, NNX objects to trees."""
