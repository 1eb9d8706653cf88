"""weightlane's versions as prime-rl's weight broadcasts, found and read by prime-rl's rules."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import DTYPES, random_bits, same
from safetensors import safe_open
from safetensors.torch import save_file
from waiting import NEVER_S
from weightlane_prime_rl import BroadcastFolder, write_step

from weightlane.ckpt_engines import ConfigError, ManifestError, StorageError, SyncAbortedError
from weightlane.sync import CollectivePublisher, LocalShard, RankExchange, SyncConfig, TensorSpec

CONFIG = SyncConfig(deadline_s=NEVER_S, connect_timeout_s=NEVER_S, stall_s=NEVER_S, retries=0, bucket_mib=0.01)
INTERRUPTED = """
import sys, torch
from weightlane_prime_rl import write_step

class Halting(dict):
    def __getitem__(self, name):
        if name == "last":
            print("one file is written", flush=True)
            sys.stdin.read()
        return super().__getitem__(name)

write_step(sys.argv[1], 2, Halting(first=torch.ones(1000), last=torch.ones(1000)), most_file_bytes=4000)
"""


def latest(output_dir: Path) -> int | None:
    """The step that prime-rl would load: ``get_latest_ckpt_step`` in its ``utils/utils.py``, at commit 559b447."""
    folder = output_dir / "broadcasts"
    for step in sorted((int(each.name.split("_")[-1]) for each in folder.glob("step_*")), reverse=True):
        if (folder / f"step_{step}" / "STABLE").exists():
            return step
    return None


def loaded(output_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """The tensors of a broadcast: ``load_state_dict`` in its ``utils/weights.py``. The index, which vLLM reads, must agree."""
    folder = output_dir / "broadcasts" / f"step_{step}"
    tensors, files = {}, {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt", device="cpu") as file:
            assert file.metadata()["format"] == "pt"
            for name in file.keys():  # noqa: SIM118 - a file is no mapping
                tensors[name], files[name] = file.get_tensor(name), path.name
    assert json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"] == files
    return tensors


def weights(version: int) -> dict[str, torch.Tensor]:
    return {
        f"{place}.{dtype}": random_bits((40, place + 1), dtype, 100 * version + place)
        for place, dtype in enumerate(DTYPES)
    }


class Run:
    """A trainer with one rank, and prime-rl's folder as its only replica."""

    def __init__(self, directory: Path, backend: str = "shm") -> None:
        self.output_dir, model = directory / "outputs", directory / "model"
        model.mkdir()
        save_file(weights(0), model / "model.safetensors")
        self.folder = BroadcastFolder(self.output_dir, model)
        self.live = weights(0)
        options = {"path": str(directory / "store")} if backend == "filesystem" else {}
        self.publisher = published(self.live, self.folder, backend, options)

    def serve(self, version: int) -> None:
        self.publisher.fence()
        for name, tensor in weights(version).items():
            self.live[name].copy_(tensor)
        self.publisher.publish(version)
        self.publisher.wait()

    def close(self) -> None:
        self.publisher.close()
        self.folder.close()


def published(
    tensors: dict[str, torch.Tensor], folder: BroadcastFolder, backend: str, options: dict[str, str]
) -> CollectivePublisher:
    shards = [LocalShard.whole(TensorSpec(name, tuple(each.shape), each.dtype), each) for name, each in tensors.items()]
    alone = RankExchange(torch.device("cpu"), alone=True)
    return CollectivePublisher(shards, [folder], backend=backend, options=options, config=CONFIG, ranks=alone)


@pytest.mark.parametrize("backend", ["shm", "gloo", "filesystem"])
def test_each_version_is_the_broadcast_that_prime_rl_loads_next_bit_for_bit(backend: str, tmp_path: Path) -> None:
    run = Run(tmp_path, backend)
    for version in (0, 2, 5):
        run.serve(version)
        assert latest(run.output_dir) == version
        found, expected = loaded(run.output_dir, version), weights(version)
        assert found.keys() == expected.keys()
        assert [name for name in expected if not same(found[name], expected[name])] == []
        # prime-rl's client does this before it loads
        (run.output_dir / f"broadcasts/step_{version}/NCCL_READY").touch()
    assert sorted(each.name for each in (run.output_dir / "broadcasts").iterdir()) == ["step_2", "step_5"]
    asyncio.run(run.folder.rollback(5))
    assert latest(run.output_dir) == 2
    run.close()


def test_a_version_that_cannot_be_written_is_aborted_and_the_broadcasts_stay(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.serve(3)
    blocked = run.output_dir / "broadcasts/.step_x"
    blocked.touch()
    with pytest.raises(SyncAbortedError, match="cannot write"):
        run.serve(4)
    blocked.unlink()
    with pytest.raises(StorageError, match="never goes back to step 2"):
        write_step(run.output_dir, 2, weights(2))
    assert latest(run.output_dir) == 3
    run.serve(5)
    assert latest(run.output_dir) == 5
    run.close()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        BroadcastFolder(tmp_path, tmp_path)
    run = Run(tmp_path)
    (tmp_path / "model/consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ConfigError, match="keep is 0"):
        BroadcastFolder(tmp_path, tmp_path / "model", keep=0)
    (tmp_path / "model/model.safetensors.index.json").write_text('{"weight_map": {"x": "consolidated.safetensors"}}')
    with pytest.raises(ConfigError, match=r"consolidated\.safetensors cannot be read"):
        BroadcastFolder(tmp_path, tmp_path / "model")
    name = next(iter(run.live))
    with pytest.raises(ManifestError, match=r"has shape \[3\], expected"):
        published(run.live | {name: run.live[name].view(-1)[:3]}, run.folder, "shm", {})
    run.close()


def test_a_writer_that_is_killed_leaves_no_broadcast_and_the_next_one_continues(tmp_path: Path, children: Any) -> None:
    write_step(tmp_path, 1, weights(1))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writer = children.start(["-c", INTERRUPTED, str(tmp_path)], forked=True, **pipes)
    assert "written" in writer.stdout.readline()
    assert list(tmp_path.rglob(".step_2/model-00001.safetensors"))
    children.reap()
    assert latest(tmp_path) == 1
    (tmp_path / "broadcasts/step_2").mkdir()  # as a trainer of prime-rl that is killed leaves it
    tied = weights(2) | dict.fromkeys(("first", "second"), torch.ones(4))
    with pytest.raises(StorageError, match="cannot write"):
        write_step(tmp_path, 2, tied | {"overlaps": tied["first"][1:]})
    write_step(tmp_path, 2, tied, most_file_bytes=500)
    assert latest(tmp_path) == 2
    assert loaded(tmp_path, 2).keys() == tied.keys()
    assert len(list((tmp_path / "broadcasts/step_2").glob("model-*.safetensors"))) > 1
    assert not list((tmp_path / "broadcasts").glob(".*"))
