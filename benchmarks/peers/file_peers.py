"""Exchange through files: safetensors, torch.save, torch.distributed.checkpoint."""

from __future__ import annotations

import shutil
import time
import warnings
from abc import abstractmethod
from pathlib import Path

import torch

from .halves import Half, HalvesPeer, Receiver, Sender
from .peer import Needs, Peer
from .workload import copy_all


class _InFolder(Half):
    def path(self, round_number: int) -> Path:
        """Where a round's file or folder goes."""
        folder = self.link.memory_dir if self.options["tmpfs"] else self.link.disk_dir
        return folder / f"round-{round_number}"


class _Saves(_InFolder, Sender):
    def send(self, round_number: int) -> None:
        self.save(self.path(round_number))
        self.link.signal_receivers()

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the tensors."""

    def after_round(self, round_number: int) -> None:
        path = self.path(round_number)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


class _Loads(_InFolder, Receiver):
    def receive(self, round_number: int) -> float:
        self.link.await_sender(self.receiver)
        blocked_from = time.monotonic()
        self.load(self.path(round_number))
        return blocked_from

    @abstractmethod
    def load(self, path: Path) -> None:
        """Read into the tensors."""


class _SafetensorsSender(_Saves):
    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.tensors, path)


class _SafetensorsReceiver(_Loads):
    def load(self, path: Path) -> None:
        from safetensors.torch import load_file

        copy_all(self.tensors, load_file(path))


class _TorchSaveSender(_Saves):
    def save(self, path: Path) -> None:
        torch.save(self.tensors, path)


class _TorchSaveReceiver(_Loads):
    def load(self, path: Path) -> None:
        copy_all(self.tensors, torch.load(path, mmap=True, weights_only=True))


class _DcpSender(_Saves):
    def save(self, path: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it saves from a single process
            save(self.tensors, checkpoint_id=path, no_dist=True)


class _DcpReceiver(_Loads):
    def load(self, path: Path) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as above
            load(self.tensors, checkpoint_id=path, no_dist=True)


class _Safetensors(HalvesPeer):
    through = "files"
    packages = ("safetensors",)
    sender = _SafetensorsSender
    receiver = _SafetensorsReceiver

    def unavailable_reason(self) -> str | None:
        """Return why safetensors cannot be imported and how to install it, or None."""
        return Needs(("safetensors.torch",), "pip install safetensors").missing()


class _TorchSave(HalvesPeer):
    through = "files"
    packages = ("torch",)
    sender = _TorchSaveSender
    receiver = _TorchSaveReceiver


class _Dcp(HalvesPeer):
    through = "files"
    packages = ("torch",)
    sender = _DcpSender
    receiver = _DcpReceiver


FILES: tuple[Peer, ...] = (
    _Safetensors("safetensors-page-cache", "save_file on a disk without fsync; load_file, copy", tmpfs=False),
    _Safetensors("safetensors-tmpfs", "save_file on tmpfs; load_file, copy", tmpfs=True),
    _TorchSave("torch-save-tmpfs", "torch.save on tmpfs; torch.load(mmap=True), copy", tmpfs=True),
    _Dcp("dcp-tmpfs", "torch.distributed.checkpoint save on tmpfs, load into the tensors", tmpfs=True),
)
