"""`TorchStore`: the torch TCPStore that the process groups of a run use for their rendezvous."""

from __future__ import annotations

import threading

import torch.distributed as dist

from weightlane.ckpt_engines.engines.torch_distributed.tcp_store import host_store


class TorchStore:
    """A torch TCPStore that is opened when the first process group requests it."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._opened: tuple[dist.TCPStore, int] | None = None

    def port(self) -> int:
        """The port on which the store listens. Opens the store if necessary, which may take seconds."""
        with self._lock:
            if self._opened is None:
                self._opened = host_store(self._host)
            return self._opened[1]

    def forget(self, session: str) -> None:
        """Delete the keys of the process groups of `session`."""
        with self._lock:
            if self._opened is not None:
                store, _ = self._opened
                for key in store.list_keys():
                    if session in key.split("/"):
                        store.delete_key(key)
