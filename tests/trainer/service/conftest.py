"""The model of the services under test; `service_process` lets every test of this folder import the public SDK."""

from __future__ import annotations

from pathlib import Path

import pytest
import service_process  # noqa: F401 - puts the SDK on sys.path
from float64_reference import VOCAB
from tiny_models import add_tokenizer, make_qwen3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_qwen3(tmp_path_factory.mktemp("models") / "qwen3", seed=3, vocab=VOCAB)
    add_tokenizer(path, VOCAB)
    return path
