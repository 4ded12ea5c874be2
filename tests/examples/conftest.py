"""What the tests of the example share: a text, and a corpus made of it."""

import pytest

TEXT = b"Scales are powers of two; data stay close to one. " * 40
CONTEXT = 8


@pytest.fixture
def text():
    return TEXT


@pytest.fixture
def corpus(tmp_path, text):
    data = pytest.importorskip("examples.gpt.data")
    path = tmp_path / "text.txt"
    path.write_bytes(text)
    return data.load_corpus([path], context=CONTEXT)
