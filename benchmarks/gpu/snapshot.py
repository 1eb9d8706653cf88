"""A training step beside a snapshot: how much longer the step takes, and how fast the snapshot is.

    python -m benchmarks.gpu.snapshot [--device cuda] [--mib 4096] [--step-ms 100] [--deadline-s 60] [--json FILE]

The step multiplies matrices on the training's stream. The snapshot casts float32 parameters to bf16, into memory of the device
and into registered memory of the host. Steps alone and steps beside take turns; medians are given.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from functools import partial
from typing import Any

import torch

from benchmarks.command import Report, as_figures, finish, options_of
from weightlane.ckpt_engines.runtime.devices import HOST, DeviceRuntime, numbered_device, runtime_of
from weightlane.sync import LocalShard, TensorSpec
from weightlane.sync.send.sending_rank import SendMemory
from weightlane.sync.send.snapshot.places import compact_places
from weightlane.sync.send.snapshot.snapshot import Progress, Snapshot

ROUNDS = 7
TENSORS = 64


class Training:
    """Training steps of about `step_s` seconds on the current stream."""

    def __init__(self, runtime: DeviceRuntime, step_s: float) -> None:
        side = 8192 if runtime.has_streams else 256
        self._runtime = runtime
        self._left, self._right, self._into = (
            torch.ones(side, side, device=runtime.device).bfloat16() for _ in range(3)
        )
        self._products = 1
        self.step()
        self._products = max(1, round(step_s / self.step()))

    def step(self) -> float:
        """Do one step. Returns its seconds."""
        self._runtime.synchronize()
        started = time.perf_counter()
        for _ in range(self._products):
            torch.mm(self._left, self._right, out=self._into)
        self._runtime.synchronize()
        return time.perf_counter() - started


def beside(
    runtime: DeviceRuntime, training: Training, shards: list[LocalShard], memory: SendMemory, deadline_s: float
) -> dict[str, float]:
    """Figures of steps with a snapshot into `memory`. Raises AssertionError when it is not what the parameters are."""
    snapshot = Snapshot.of(shards, compact_places(shards))
    errors: list[BaseException] = []
    alone, together, taken = [], [], []

    def take(mark: Any, began: threading.Event) -> None:
        began.set()
        started = time.perf_counter()
        try:
            snapshot.take(memory.data, mark, Progress("the snapshot", "benchmark"))
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
            errors.append(error)
        taken.append(time.perf_counter() - started)

    for turn in range(ROUNDS + 1):
        quiet = training.step()
        began = threading.Event()
        thread = threading.Thread(target=take, args=(snapshot.mark(), began), daemon=True)
        thread.start()
        assert began.wait(deadline_s), f"the snapshot did not begin within {deadline_s:.0f} s"
        busy = training.step()
        thread.join(deadline_s)
        assert not thread.is_alive(), f"the snapshot took longer than {deadline_s:.0f} s"
        if errors:
            raise errors[0]
        if turn:
            alone.append(quiet)
            together.append(busy)
    snapshot.close()
    for place, shard in zip(compact_places(shards), shards, strict=True):
        found = memory.data[place : place + shard.nbytes].view(torch.bfloat16).to(runtime.device)
        assert torch.equal(found, shard.data.bfloat16()), f"the snapshot of {shard.spec.name} is wrong"
    step_s, beside_s, snapshot_s = (statistics.median(times) for times in (alone, together, taken[1:]))
    return {
        "step alone, ms": 1e3 * step_s,
        "beside, ms": 1e3 * beside_s,
        "longer by, share": beside_s / step_s - 1,
        "snapshot, ms": 1e3 * snapshot_s,
        "snapshot reads, GB/s": sum(shard.data.nbytes for shard in shards) / snapshot_s / 1e9,
    }


def measure(device: str, mib: int, step_s: float, deadline_s: float) -> Report:
    """The report: figures of snapshots into memory of the device, and into memory of the host."""
    runtime = runtime_of(numbered_device(device))
    torch.manual_seed(0)
    numel = (mib << 18) // TENSORS
    shards = [
        LocalShard.whole(TensorSpec(f"w{number}", (numel,), torch.bfloat16), torch.randn(numel, device=runtime.device))
        for number in range(TENSORS)
    ]
    nbytes = compact_places(shards)[-1] + shards[-1].nbytes
    figures: dict[str, Any] = {"float32 parameters, MB": sum(shard.data.nbytes for shard in shards) / 1e6}
    runtime.synchronize()
    with runtime.on(runtime.stream_for(runtime)):  # the training's
        training = Training(runtime, step_s)
        for name, where in (("device", runtime.device), ("host", HOST)):
            memory = SendMemory(None, nbytes, where, copied_from=runtime)
            try:
                found = beside(runtime, training, shards, memory, deadline_s)
            finally:
                memory.close()
            figures |= {f"to the {name}: {what}": value for what, value in found.items()}
    return {"figures": figures, "verified": True}


def main() -> int:
    """Measure, and write JSON if asked to."""
    parser = options_of(__doc__, deadline_s=60.0, device="cuda")
    parser.add_argument("--mib", type=int, default=4096, help="of parameters, float32")
    parser.add_argument("--step-ms", type=float, default=100.0)
    options = parser.parse_args()
    report = partial(measure, options.device, options.mib, options.step_ms / 1e3, options.deadline_s)
    return finish("snapshot", report, as_figures, options.json, options.device)


if __name__ == "__main__":
    sys.exit(main())
