"""The parts of a replica that need no engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pydantic import ValidationError
from tiny_models import make_architecture, make_qwen3, make_qwen3_moe, quantised_copy
from waiting import HANG_S, MovableClock, wait_until

from weightlane import rollout
from weightlane.ckpt_engines import ConfigError, DeadlineExceededError, SyncAbortedError, WeightlaneError
from weightlane.rollout import vllm_surface
from weightlane.rollout.commit.live_weights import LiveWeights
from weightlane.rollout.commit.remote_failure import RemoteFailureError, failure_from_text
from weightlane.rollout.commit.token_clock import TokenClock
from weightlane.rollout.config import AdapterConfig, RolloutConfig
from weightlane.rollout.contract.cleaner import Cleaner
from weightlane.rollout.contract.named_segments import mapped_segments, segments_of_trees
from weightlane.rollout.contract.rank_group import RankGroup
from weightlane.rollout.contract.requests import GenerationRequest, Sampling
from weightlane.rollout.engines.transformers.engine import TransformersEngine
from weightlane.rollout.layout.loading.adapter_tensors import adapted_layers, max_rank
from weightlane.rollout.layout.loading.refused_arguments import refuse_arguments
from weightlane.rollout.layout.loading.refused_models import _refuse_modes, refuse_other_versions, refuse_unsupported
from weightlane.rollout.layout.rank_model import RankModel
from weightlane.rollout.vllm import plugin as vllm_plugin
from weightlane.rollout.vllm.checked_replica import check_replica
from weightlane.rollout.vllm.engine import VllmEngine
from weightlane.rollout.vllm.environment import engine_arguments
from weightlane.rollout.vllm.generation import Generated


def test_a_typed_error_survives_being_quoted_in_another_errors_text_and_other_text_promises_nothing() -> None:
    error = SyncAbortedError('the "old" one {serves}', part="x", peer="y", hint="z", version=3)
    for intact in (True, False):
        quoted = f"Call failed: Worker failed with error '{RemoteFailureError(error, intact=intact)}', see above"
        failure = failure_from_text(quoted, part="replica")
        assert type(failure.error) is SyncAbortedError
        assert str(failure.error) == str(error)
        assert failure.intact is intact
    for text in ("plain", "cut weightlane-error:{", "weightlane-error:[1]", "weightlane-error:{}"):
        failure = failure_from_text(text, part="replica")
        assert text in str(failure.error)
        assert not failure.intact


def test_a_gap_spans_the_commit_and_not_the_step_that_was_still_under_way() -> None:
    async def life() -> None:
        clock = TokenClock(now := MovableClock())
        for request in ("a", "b", "waiting"):
            clock.begin(request)
        clock.arrived("a", 1)
        clock.arrived("b", 1)
        assert clock.commit_begins(7) == 2
        now.advance(0.5)
        clock.arrived("a", 1)  # the step that was under way
        now.advance(2.0)
        clock.commit_ends(7)
        resumed = asyncio.create_task(clock.gap_s(7, HANG_S))
        await asyncio.sleep(0)
        clock.arrived("a", 1)
        assert not resumed.done()
        clock.end("b")
        assert await resumed == 2.0
        now.advance(8.0)
        clock.arrived("a", 1)
        assert clock.gaps_s[7] == 2.0
        # A request that does not go on counts with its gap so far, and later with the whole one.
        clock.commit_begins(8)
        now.advance(4.0)
        clock.commit_ends(8)
        assert await clock.gap_s(8, 0.01) == 4.0
        now.advance(8.0)
        clock.arrived("a", 1)
        assert clock.gaps_s[8] == clock.max_gap_s == 12.0
        # No commit costs later tokens anything, also if it failed, or if there was no request.
        for version in range(9, 1200):
            clock.commit_begins(version)
            if version % 2:
                clock.commit_ends(version)
            clock.arrived("a", 1)
        assert (clock._watched, len(clock.gaps_s)) == ({}, 1000)

    asyncio.run(life())


@pytest.mark.parametrize("settled", [False, True], ids=["while it starts", "when it has started"])
def test_the_cleaner_removes_the_segments_of_its_engine_and_waits_until_then(settled: bool) -> None:
    def segment() -> shared_memory.SharedMemory:
        made = shared_memory.SharedMemory(create=True, size=64)
        # Ours to remove, not the tracker's, which would complain.
        resource_tracker.unregister(f"/{made.name}", "shared_memory")
        return made

    before = segment()
    cleaner = Cleaner()
    cleaner.watch()
    segments = {"before": before, "its": segment(), "other": segment()}
    paths = {name: Path("/dev/shm") / made.name for name, made in segments.items()}
    try:
        assert set(paths.values()) <= segments_of_trees([os.getpid()])
        if settled:
            cleaner.settle([paths["its"]])
        time.sleep(0.3)
        assert all(path.exists() for path in paths.values())
        cleaner.close()
        cleaner.close()
        left = {name for name, path in paths.items() if path.exists()}
        assert left == ({"before", "other"} if settled else {"before"})
        assert paths["its"] not in mapped_segments()
    finally:
        for name, made in segments.items():
            made.close()
            paths[name].unlink(missing_ok=True)


def _marked(marker: str) -> Iterator[psutil.Process]:
    """The processes that inherited the marker."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("WEIGHTLANE_TEST_CLEANER") == marker:
                yield process


def test_the_cleaner_removes_what_a_replica_leaves_that_is_killed_with_all_below_it_while_it_starts() -> None:
    """Also a semaphore, which is mapped under another name than its own."""
    made_below = (
        "import multiprocessing; from multiprocessing import resource_tracker, shared_memory; import time\n"
        "made = shared_memory.SharedMemory(create=True, size=64)\n"
        "resource_tracker.unregister('/' + made.name, 'shared_memory')\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(made.name, 'sem.' + lock._semlock.name[1:], flush=True); time.sleep(1000)"
    )
    starts = (
        "import subprocess, sys\n"
        "from weightlane.rollout.contract.cleaner import Cleaner\n"
        "cleaner = Cleaner(); cleaner.watch()\n"
        f"subprocess.run([sys.executable, '-c', {made_below!r}])"
    )
    marker = uuid.uuid4().hex
    replica = subprocess.Popen(
        [sys.executable, "-c", starts],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "WEIGHTLANE_TEST_CLEANER": marker},
    )
    paths: list[Path] = []
    try:
        assert replica.stdout is not None
        paths += [Path("/dev/shm") / name for name in replica.stdout.readline().split()]
        assert [path.exists() for path in paths] == [True, True]
        (cleaner,) = (each for each in _marked(marker) if ".contract.cleaner" in each.cmdline()[-2])
        # It sleeps between two looks, so after three sleeps it has looked once from beginning to end.
        slept = cleaner.num_ctx_switches().voluntary
        wait_until(lambda: cleaner.num_ctx_switches().voluntary >= slept + 3, "the cleaner has looked")
        for each in psutil.Process(replica.pid).children(recursive=True):  # as Ray does
            with contextlib.suppress(psutil.NoSuchProcess):  # the resource tracker ends with its owner
                each.kill()
        os.killpg(replica.pid, signal.SIGKILL)
        wait_until(lambda: not any(path.exists() for path in paths), "the segments are removed")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(replica.pid, signal.SIGKILL)
        replica.communicate(timeout=HANG_S)
        for path in paths:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize(("kind", "loads"), [(VllmEngine, "_make_engine"), (TransformersEngine, "_load")])
def test_a_start_that_is_given_up_ends_its_engine_and_does_not_keep_the_program_from_ending(
    kind: type[VllmEngine | TransformersEngine], loads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemons, go, ended = [], threading.Event(), threading.Event()

    def load(engine: Any) -> None:
        daemons.append(threading.current_thread().daemon)
        go.wait(HANG_S)
        engine._engine = SimpleNamespace(shutdown=lambda **_: ended.set())

    monkeypatch.setattr(kind, loads, load)
    engine = kind("rollout-0", RolloutConfig(start_timeout_s=0.01), tmp_path)

    def is_loading() -> bool:
        with pytest.raises(DeadlineExceededError, match=r"within 0 s\. Raise rollout\.start_timeout_s"):
            asyncio.run(engine.start(0))
        return bool(daemons)

    wait_until(is_loading, "a start whose thread begins before it is given up")
    is_loading()  # this one waits for the end of the first
    go.set()
    if kind is VllmEngine:
        wait_until(ended.is_set, "the end of vLLM's engine")
        assert daemons == [True]
    assert all(daemons)
    assert not engine.open


# -- what of vLLM is used -----------------------------------------------------------------------------------------------


def plain_config(**more: Any) -> Any:
    parallel = SimpleNamespace(world_size=2, tensor_parallel_size=2, data_parallel_size=1, enable_eplb=False)
    for name in more.keys() & vars(parallel).keys():
        setattr(parallel, name, more.pop(name))
    model = SimpleNamespace(quantization=None, hf_config=None)
    usual = {"parallel_config": parallel, "model_config": model, "lora_config": None, "speculative_config": None}
    return SimpleNamespace(**{**usual, **more})


def test_modes_in_which_weights_would_stay_old_or_go_nowhere_are_refused_by_name() -> None:
    for settings, named in (
        ({"enable_eplb": True}, "expert load balancing (enable_eplb)"),
        ({"world_size": 4}, "replicas with pipeline, data or prefill context parallelism"),
        ({"data_parallel_size": 2}, "replicas with pipeline, data or prefill context parallelism"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "a draft model (speculative_config, eagle3)"),
    ):
        with pytest.raises(ConfigError, match=re.escape(named)):
            refuse_unsupported(torch.nn.Module(), plain_config(**settings), torch.device("cpu"))
    _refuse_modes(plain_config(speculative_config=SimpleNamespace(method="ngram")))
    weights, adapters = plain_config(), plain_config(lora_config=object())
    refuse_other_versions(weights, adapter=False)
    refuse_other_versions(adapters, adapter=True)
    with pytest.raises(ConfigError, match=r"LoRA adapters \(enable_lora\) takes no versions of weights"):
        refuse_other_versions(adapters, adapter=False)
    with pytest.raises(ConfigError, match=r"trainer\.lora\.publish.*no slots"):
        refuse_other_versions(weights, adapter=True)


def test_models_and_adapters_that_cannot_be_served_are_refused_by_the_setting(tmp_path: Path) -> None:
    dense = make_qwen3(tmp_path / "dense", seed=0)
    found = adapted_layers(dense, AdapterConfig(rank=3, alpha=1, targets=("q_proj", "down_proj")))
    assert found == {
        f"model.layers.{layer}.{name}": shape
        for layer in range(2)
        for name, shape in (("self_attn.q_proj", (128, 64)), ("mlp.down_proj", (64, 128)))
    }
    assert max_rank(AdapterConfig(rank=9, alpha=1)) == 16
    moe, fp8 = make_qwen3_moe(tmp_path / "moe", seed=0), quantised_copy(dense, tmp_path / "fp8")
    for model, adapter, says in (
        (dense, {"rank": 513}, "trainer.lora.rank is 513"),
        (dense, {"rank": 2, "targets": ("q_prj",)}, "'q_prj'.*trainer.lora.targets names.*Did you mean 'q_proj'"),
        (moe, {"rank": 2}, "has experts.*trainer.lora.publish is adapter"),
        (fp8, {"rank": 2}, "is quantised.*trainer.lora.publish is adapter"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){says}"):
            adapted_layers(model, AdapterConfig.model_validate({"alpha": 1, **adapter}))


def test_experts_are_read_out_of_what_vllm_returns_and_have_a_row_for_every_token_but_the_last() -> None:
    """VLLM's outputs, as it documents them: no engine returns experts on a CPU."""
    rows = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
    span = SimpleNamespace(version="7", start=0, end=2)
    last = SimpleNamespace(finish_reason="length", weight_versions=[span], routed_experts=rows)
    request = GenerationRequest("k", "r", [5, 6, 7], Sampling(2))
    found = Generated([8, 9], [-1.0, -2.0], last=last).completion(request, "rollout-0").routed_experts
    assert found is not None
    assert (found == rows).all()
    assert found.dtype == np.int16
    with pytest.raises(WeightlaneError, match="4 and 2 tokens, 4 rows of experts"):
        Generated([8, 9], [-1.0, -2.0], last=last).completion(replace(request, prompt_ids=[4, 5, 6, 7]), "rollout-0")
    config = RolloutConfig(routed_experts=True)
    assert engine_arguments(config, Path("model"), on_cpu=False)["enable_return_routed_experts"]


@pytest.mark.vllm
@pytest.mark.usefixtures("forked_answers")
def test_a_replicas_refusals_are_known_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    qwen3, bloom = make_qwen3(tmp_path / "qwen3", seed=0), make_architecture("bloom", tmp_path / "bloom")
    experts = make_qwen3_moe(tmp_path / "experts", seed=0, experts=2)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64, "model_max_length": "none"}')
    refuse_arguments(RolloutConfig(max_model_len=65), tmp_path)  # vLLM refuses what it cannot read
    os.environ["OMP_NUM_THREADS"] = "7"
    adapter, divided = {"adapter": {"rank": 2, "alpha": 1}}, {"expert_parallel": True}
    for model, settings, says in (
        (qwen3, {"extra_engine_args": {"max_modl_len": 3}}, "'max_modl_len'.*Did you mean 'max_model_len'"),
        (experts, {"routed_experts": True}, "returns the experts of tokens on GPUs only"),
        (qwen3, {"extra_engine_args": {"max_num_batched_tokens": -1}}, "max_num_batched_tokens: Input should be"),
        (qwen3, {"extra_engine_args": {"tensor_parallel_size": 0}}, "weightlane sets. Set rollout.tensor_parallel"),
        (bloom, {"max_model_len": 64, **adapter}, "(vLLM has no adapters|LoRA is not supported) for BloomForCausalLM"),
        (experts, {"tensor_parallel": 4, **divided}, r"2 experts cannot be divided.*\(--tp\) to at most 2"),
        (qwen3, {"tensor_parallel": 2, **divided}, "expert_parallel is true, and the model has no experts"),
    ):
        config = RolloutConfig.model_validate(settings)
        with pytest.raises(ConfigError, match=says) as checked:
            check_replica(config, model)
        with pytest.raises(ConfigError, match=f"^{re.escape(str(checked.value))}$"):
            asyncio.run(rollout.LocalReplica("rollout-0", config, model).start())
    assert os.environ["OMP_NUM_THREADS"] == "1", "that of the settings"
    assert check_replica(RolloutConfig.model_validate(adapter), qwen3) == ""
    with pytest.raises(ValidationError, match="set tensor_parallel to more than 1"):
        RolloutConfig(expert_parallel=True)


def test_an_inside_of_vllm_that_has_gone_is_named_and_vllm_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_surface, "_WHERE", {**vllm_surface._WHERE, "gone": "json", "lost": "no_such_module"})
    for name, where in (("gone", "json.gone"), ("lost", "no_such_module.lost")):
        with pytest.raises(ConfigError, match=rf"this vLLM.* has no {where}, which weightlane uses"):
            getattr(vllm_surface, name)
    monkeypatch.setattr(vllm_surface, "failures", [])

    def fail() -> None:
        raise ImportError("cannot import name 'WeightTransferEngineFactory'")

    monkeypatch.setattr(vllm_plugin, "_register", fail)
    vllm_plugin.register()
    with pytest.raises(ConfigError, match=r"could not prepare this vLLM.*WeightTransferEngineFactory"):
        vllm_surface.check_internals(on_cpu=True)


@pytest.mark.vllm
def test_all_that_is_used_of_vllm_is_there_and_nobody_looks_into_it_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(logging.getLogger(vllm_surface.__name__), "warning", lambda text, _: warned.append(text))
    vllm_surface.check_internals(on_cpu=True)
    for call, says in (
        (("EngineCore.pause_scheduler", 1, ("mood",)), "EngineCore.pause_scheduler of this vLLM.*'mood'"),
        (("EngineCore.resume_scheduler", 2, ()), "EngineCore.resume_scheduler of this vLLM.*too many positional"),
        (("EngineCore.snooze", 1, ()), "EngineCore of this vLLM.* has no snooze"),
    ):
        monkeypatch.setattr(vllm_surface, "_CALLS", [call])
        with pytest.raises(ConfigError, match=says):
            vllm_surface.check_internals(on_cpu=True)
    monkeypatch.setattr(vllm_surface, "_CALLS", [])
    monkeypatch.setattr(vllm_surface, "TRIED", ((0, 1), (0, 2)))
    vllm_surface._warn_if_untried.cache_clear()
    assert not warned, "this release was tried"
    for _ in range(2):
        vllm_surface.check_internals(on_cpu=True)
    (warning,) = warned
    assert "was not tried with weightlane" in warning
    inside = re.compile(r"from (vllm\.model_executor|vllm\.forward_context|vllm\.utils)[\w.]* import")
    folder = Path(rollout.__file__).parent
    found = [path.name for path in folder.rglob("*.py") if inside.search(path.read_text())]
    assert sorted(found) == ["experts.py", "layers.py"], "they replace functions of modules"


@pytest.mark.vllm
@pytest.mark.parametrize("graphs", ["NONE", "FULL_AND_PIECEWISE"])
def test_weights_that_move_away_from_captured_graphs_are_quarantined(graphs: str) -> None:
    from weightlane.rollout.layout.version_loader import VersionLoader

    model = torch.nn.Linear(2, 2)

    def write(tensors: Mapping[str, torch.Tensor]) -> None:
        model.weight = torch.nn.Parameter(tensors["weight"].clone())  # as a layer that does not fill its parameter

    mode = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name=graphs)))
    loader = VersionLoader(RankModel(model, mode, torch.device("cpu"), "rollout rank 0"))
    loader.write, loader.learn = write, lambda *_, **__: None  # type: ignore[method-assign]
    subscriber = SimpleNamespace(
        take=lambda version: {"weight": torch.full((2, 2), float(version))},
        take_previous=lambda version: (version - 1, {"weight": torch.full((2, 2), version - 1.0)}),
        take_stream=lambda _: None,
        take_delta=lambda _: None,
        release=lambda _: None,
    )
    weights = LiveWeights(loader, RankGroup(None))
    answers = [weights.update({"version": version}, subscriber) for version in (1, 2)]  # type: ignore[arg-type]
    if graphs == "NONE":
        assert answers == [None, None]
    else:
        assert [type(answer).__name__ for answer in answers] == ["QuarantinedError"] * 2
        assert "weight and 0 more tensors have moved" in str(answers[1])
    assert weights.intact == (graphs == "NONE")
