"""Helpers that know nothing of scales: dtypes, powers of two, statistics, walks over jaxprs."""
