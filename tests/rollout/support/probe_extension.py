"""vLLM worker extension for tests: it reads raw parameters and fails on purpose, which vLLM's own interface cannot do."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_models import described
from waiting import wait_until


class ProbeExtension:
    """Mixed into vLLM's worker by ``worker_extension_cls``; methods are called with ``collective_rpc``."""

    def probe_parameters(self) -> dict[str, list[object]]:
        """Every live parameter of this rank, `described`."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return {name: described(tensor) for name, tensor in model.named_parameters()}

    def probe_process(self) -> int:
        """This rank's process id."""
        return os.getpid()

    def probe_pace(self, seconds: float) -> None:
        """Let every decode step last so long at least, and use no CPU meanwhile; 0 ends that."""
        runner = self.model_runner  # type: ignore[attr-defined]
        runner.__dict__.pop("execute_model", None)
        if seconds:
            execute = runner.execute_model

            def unhurried(*arguments: Any, **named: Any) -> Any:
                time.sleep(seconds)
                return execute(*arguments, **named)

            runner.execute_model = unhurried

    def probe_fail_loading(self, rank: int, after: int, times: int) -> None:
        """Let the next `times` loads of one rank fail once they have put `after` tensors into the model."""
        plan = self._plan()
        plan.__dict__.pop("commit", None)
        if self.rank != rank:  # type: ignore[attr-defined]
            return
        commit, failures = plan.commit, itertools.count(1)

        def failing(tensors: Mapping[str, torch.Tensor]) -> None:
            if next(failures) > times:
                plan.__dict__.pop("commit", None)
                commit(tensors)
                return
            for name in itertools.islice(plan.sources, after):
                plan.write_elements(name, 0, tensors[name].view(-1))
            raise MemoryError("out of memory, on purpose")

        plan.commit = failing

    def probe_takes_deltas(self) -> bool:
        """Whether the last version was put into the parameters as a delta."""
        weights = self.weight_transfer_engine._rank.updatable  # type: ignore[attr-defined]
        return weights.loader.takes_deltas and weights._undo is not None

    def probe_fail_exchange(self, rank: int, after: int, times: int = 1) -> None:
        """Let the next delta of one rank fail once `after` tensors, and half of another, have their new values.

        With `times` above 1 taking it back fails, too, at its first tensor.
        """
        from weightlane.rollout.layout.write import live_delta

        if self.rank != rank:  # type: ignore[attr-defined]
            return
        write, calls = live_delta._write, itertools.count()

        def failing(elements: Any, values: Any) -> None:
            if (call := next(calls)) >= after:
                if call + 1 == after + times:
                    live_delta._write = write
                half = len(values) // 2
                write(dataclasses.replace(elements, offsets=elements.offsets[:half]), values[:half])
                raise MemoryError("out of memory, on purpose")
            write(elements, values)

        live_delta._write = failing

    def probe_hold(self, method: str, folder: str, after: int = 0) -> None:
        """Let a coming call of the plan's `method` write ``reached`` into `folder`, and wait there until it finds ``go``.

        Args:
            after: How many calls come before that one. An empty `folder` ends all that.
        """
        plan = self._plan()
        plan.__dict__.pop(method, None)
        if folder:
            function, calls = getattr(plan, method), itertools.count()

            def holding(*arguments: Any) -> None:
                if next(calls) == after:
                    Path(folder, "reached").touch()
                    wait_until(Path(folder, "go").exists, "leave to go on")
                function(*arguments)

            setattr(plan, method, holding)

    def probe_touch_caches(self) -> int:
        """Fill the caches of this rank, as requests would; returns their size in bytes."""
        return sum(storage.fill_(1).nbytes() for storage in self._storages()["caches"])

    def probe_resident(self) -> dict[str, int]:
        """How many bytes of the memory that a deep sleep frees are not zero."""
        return {
            name: sum(int(_bytes(storage).count_nonzero()) for storage in storages)
            for name, storages in self._storages().items()
        }

    def probe_kept(self) -> dict[str, list[object]]:
        """Every tensor of this rank's model that no version has, `described`."""
        from weightlane.rollout.layout.proof.model_tensors import tensors_of

        freed = {storage._cdata for storage in self._storages()["weights"]}
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return {
            name: described(tensor.reshape(-1))
            for name, tensor in tensors_of(model).items()
            if tensor.numel() and tensor.untyped_storage()._cdata not in freed
        }

    def probe_fail_waking(self, rank: int) -> None:
        """Let one rank fail when its weights next wake."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]

        def failing(*arguments: Any) -> None:
            del engine.wake
            raise MemoryError("out of memory, on purpose")

        if self.rank == rank:  # type: ignore[attr-defined]
            engine.wake = failing

    def _storages(self) -> dict[str, list[torch.UntypedStorage]]:
        from weightlane.rollout.vllm_cpu.sleep import cache_storages

        weights = self.weight_transfer_engine._rank.updatable  # type: ignore[attr-defined]
        return {
            "weights": list(weights.loader.replaced_storages().values()),
            "caches": list(cache_storages(self).values()),
        }

    def probe_sliced(self) -> bool:
        """Whether the newest version was copied out of slices."""
        return self.weight_transfer_engine._rank.updatable.loader._writer._sliced is not None  # type: ignore[attr-defined]

    def probe_way(self) -> list[str]:
        """How versions are loaded, and why not by copies alone."""
        method = self.weight_transfer_engine._rank.updatable.loader.method  # type: ignore[attr-defined]
        return [str(method.kind), method.summary]

    def probe_reload(self, path: str) -> None:
        """Load a checkpoint through vLLM's own reload of a whole model."""
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config

        from weightlane.rollout.layout.loading.reload import load_version

        config = self.vllm_config  # type: ignore[attr-defined]
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        with set_current_vllm_config(config):
            load_version(model, config.model_config, load_file(f"{path}/model.safetensors").items(), part="probe")

    def probe_layout(self) -> str:
        """Where this rank's loading puts what."""
        return str(self._plan().layout)

    def _plan(self) -> Any:
        plan = self.weight_transfer_engine._rank.updatable.loader.plan  # type: ignore[attr-defined]
        assert plan is not None, "no version was committed yet, or versions are not copied"
        return plan

    def probe_adapters(self) -> list[int]:
        """Ids of the adapters that this rank has."""
        return sorted(self._adapters().list_adapters())

    def probe_slot(self, adapter: int) -> dict[str, list[object]]:
        """Every tensor of the slot that an adapter is in, `described`, after putting it into one if it is in none."""
        manager = self._adapters()
        manager.activate_adapter(adapter)
        slot = manager.lora_index_to_id.index(adapter)
        return {
            f"{name}.{matrix}.{part}": described(stacked[slot])
            for name, module in manager.modules.items()
            for matrix, parts in (("A", module.lora_a_stacked), ("B", module.lora_b_stacked))
            for part, stacked in enumerate(parts)
        }

    def probe_slot_of_files(self, directory: str) -> dict[str, list[object]]:
        """Every tensor of the slot of an adapter that vLLM itself loads from PEFT's files, as `probe_slot` gives them."""
        from vllm.lora.request import LoRARequest

        own = 1 << 19
        assert self.add_lora(LoRARequest("oracle", own, directory))  # type: ignore[attr-defined]
        found = self.probe_slot(own)
        assert self.remove_lora(own)  # type: ignore[attr-defined]
        return found

    def probe_fail_adapter(self, rank: int) -> None:
        """Let one rank fail when it next puts an adapter into a slot, half-way."""
        if self.rank != rank:  # type: ignore[attr-defined]
            return
        layers = list(self._adapters().modules.values())
        layer = layers[len(layers) // 2]

        def failing(*arguments: Any) -> None:
            del layer.set_lora
            raise MemoryError("out of memory, on purpose")

        layer.set_lora = failing

    def _adapters(self) -> Any:
        return self.model_runner.get_model().lora_manager  # type: ignore[attr-defined]

    def probe_poison_staging(self) -> int:
        """Overwrite whatever staging memory this rank's subscriber has; returns its size in bytes."""
        staging = self.weight_transfer_engine._rank._subscriber._staging  # type: ignore[attr-defined]
        slots: list[torch.Tensor] = [staging._incoming.data, staging._serving.data]
        for slot in slots:
            slot.fill_(0xA5)
        return sum(slot.numel() for slot in slots)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
