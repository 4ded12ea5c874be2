"""What knows of no scales: dtypes, powers of two, statistics, walks over jaxprs."""
