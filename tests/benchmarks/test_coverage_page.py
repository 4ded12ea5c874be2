"""docs/coverage.md has the rules that there are, in the groups that they are written in."""

import subprocess
import sys

from benchmarks.coverage.sweep import PAGE


def test_the_page_is_that_of_the_registry_and_of_the_stored_results():
    """In a process of its own: other tests register rules."""
    code = "from benchmarks.coverage.sweep import page; print(page(), end='')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == PAGE.read_text()
