"""Fake of the CUDA driver: memory of a `World` that both halves see, in one process."""

from __future__ import annotations

from .streams import FREED, WRONG_DEVICE
from .world import World


class Driver:
    """Fake with the calls of `weightlane.ckpt_engines.engines.shared_memory.cuda_driver.CudaDriver`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def allocate(self, device: int, nbytes: int) -> int:
        """Address of fresh memory, which torch's allocator knows nothing of."""
        return self._world.allocate(device, nbytes, by_driver=True).address

    def free(self, device: int, pointer: int) -> None:
        block, _ = self._world.find(pointer)
        if block.device != device:
            self._world.violate(WRONG_DEVICE, f"memory of device {block.device} was freed on {device}")
        self._world.free(block)

    def export(self, device: int, pointer: int) -> bytes:
        assert self._world.find(pointer)[0].device == device
        return self._world.handle_of(pointer)

    def open(self, _device: int, handle: bytes) -> int:
        return int(self._world.by_handle(handle))

    def close(self, _device: int, pointer: int) -> None:
        """Unmap the memory at `pointer`, which no copy may use any more."""
        block, _ = self._world.find(pointer)
        for access in block.accesses:
            if access.what == "copy of a bucket" and self._world.host.get(access.stream, 0) < access.count:
                self._world.violate(FREED, "a mapping was closed under a copy")

    def copy(self, device: int, destination: int, source: int, nbytes: int, stream: int) -> None:
        world = self._world
        into, to = world.find(destination)
        out_of, at = world.find(source)
        on = world.streams[stream]
        if on.device != device or into.device != device:
            world.violate(WRONG_DEVICE, f"device {device} copies to {into.device} on a stream of {on.device}")
        into.bytes(to, to + nbytes)[:] = out_of.bytes(at, at + nbytes)
        operation = on.put("copy of a bucket")
        world.access(operation, out_of, at, at + nbytes, writes=False)
        world.access(operation, into, to, to + nbytes, writes=True)
