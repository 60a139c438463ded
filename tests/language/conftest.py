"""What most tests of language models share."""

from pathlib import Path

import pytest

from tests.support import tiny_lm


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The folder of a tiny language model with random weights."""
    return tiny_lm.write(tmp_path_factory.mktemp("lm"))
