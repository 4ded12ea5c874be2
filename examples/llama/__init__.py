"""A Llama that trains on any mesh, and compiles for machines that are not there."""
