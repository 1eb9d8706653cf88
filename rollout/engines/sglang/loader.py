"""`SglangLoader`: hands each version to a server as a safetensors file in memory."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from weightlane.sync import Expectation
from weightlane.sync.version.sliced_tensors import without_data
from weightlane.sync.version.tensor_spec import SAFETENSORS_DTYPES

from ...contract.loader import RankLoader

_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_ALIGNMENT = 64


class SglangLoader(RankLoader):
    """The one rank of a replica: SGLang divides tensors between its own ranks.

    Args:
        expectation: The tensors that a version has to have.
        part: Name of the rank in errors.
        serve: Called with a directory for each version, to have the server load it; raises if it does not serve then.
    """

    def __init__(self, expectation: Expectation, part: str, serve: Callable[[Path], None]) -> None:
        self.part, self.device, self.expectation = part, torch.device("cpu"), expectation
        self.writes_atomically = True
        self._serve = serve
        self._files = ExitStack()
        """Holds the file of the version that was written last, until it serves."""
        self._directory = Path()

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a version's file, while the server generates."""
        self._files.close()
        self.writes_atomically = True
        self._directory = self._files.enter_context(directory_of(tensors))

    def settle(self) -> None:
        """Have the server load the file that was written."""
        with self._files:
            self._serve(self._directory)


@contextmanager
def directory_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[Path]:
    """A directory with one safetensors file of `tensors`, which other processes of this user can read.

    The file is anonymous memory behind a symbolic link, so that nothing of its size outlives this process.
    """
    with (
        tempfile.TemporaryDirectory(prefix="weightlane-sglang-") as directory,
        os.fdopen(os.memfd_create("weightlane-version"), "wb") as file,
    ):
        specs = without_data(tensors)
        order = sorted(specs, key=lambda name: -specs[name].element_size())
        file.write(_header({name: specs[name] for name in order}))
        for name in order:
            file.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        Path(directory, "model.safetensors").symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        yield Path(directory)


def _header(specs: Mapping[str, torch.Tensor]) -> bytes:
    """The header of a safetensors file, https://github.com/huggingface/safetensors; wide dtypes come first, to be aligned."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in specs.items():
        start, end = end, end + spec.numel() * spec.element_size()
        content[name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(content).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    return struct.pack("<Q", len(header)) + header
