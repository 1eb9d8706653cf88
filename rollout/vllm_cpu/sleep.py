"""Sleep on a CPU: the kernel takes back the pages of weights and caches, and the tensors stay at their addresses.

vLLM's sleep mode frees the physical memory of a GPU's tensors and keeps their addresses. Its CPU build ignores the call. Here the
kernel drops pages in the same way (`madvise` with ``MADV_DONTNEED``): compiled code, views and layout maps that hold an address
stay valid, the memory reads as zeros, and takes pages again when it is written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def cache_storages(worker: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of the key and value caches of vLLM's `worker`, by torch's ids."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    caches = tree_leaves([getattr(layer, "kv_cache", None) for layer in layers])
    return {
        each.untyped_storage()._cdata: each.untyped_storage()
        for each in caches
        if isinstance(each, torch.Tensor) and not each.is_meta
    }


def drop_pages(storages: Iterable[torch.UntypedStorage]) -> None:
    """Give the pages of `storages` back to the kernel. All their bytes are zero then. Raises `OSError` if the kernel refuses."""
    for storage in storages:
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            ctypes.memset(start, 0, end - start)
            continue
        ctypes.memset(start, 0, first - start)  # other objects have a part of these pages
        ctypes.memset(last, 0, end - last)
        if _LIBC.madvise(first, last - first, mmap.MADV_DONTNEED):
            error = ctypes.get_errno()
            raise OSError(error, f"the kernel does not take back {last - first} bytes: {os.strerror(error)}")
