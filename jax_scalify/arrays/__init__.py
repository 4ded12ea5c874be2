"""`ScaledArray`, and conversions of trees."""
