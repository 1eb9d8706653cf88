"""``trainer.colocate``: the settings that a run needs in which trainer and rollouts take turns on the same devices."""

from __future__ import annotations

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError
from weightlane.rollout.config import RolloutConfig
from weightlane.sync import CheckpointEngineConfig, SyncConfig
from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.loop.config import LoopConfig

_PART = "configuration"


def check_colocation(
    engine: CheckpointEngineConfig, sync: SyncConfig, rollout: RolloutConfig, loop: LoopConfig
) -> RolloutConfig:
    """Return `rollout` with the settings of a run with ``trainer.colocate``. Raises `ConfigError` for what contradicts it."""
    facts = CheckpointEngineRegistry().engine_class(engine.backend).capabilities
    for fits, key, value, wanted, why in (
        (loop.max_staleness == 0, "loop.max_staleness", loop.max_staleness, "0", "nothing is generated during a step"),
        (
            rollout.commit == "in_place",
            "rollout.commit",
            rollout.commit,
            "in_place",
            "a rollout that has slept has no weights to keep, so a staged version would only take memory",
        ),
        (sync.codec == "dense", "sync.codec", sync.codec, "dense", "a rollout that has slept has no version to change"),
        (sync.quorum == 1, "sync.quorum", sync.quorum, "1", "a rollout that missed a version could not get it later"),
        (
            facts.same_host_only,
            "checkpoint_engine.backend",
            engine.backend,
            "shm or cuda_ipc",
            "trainer and rollouts are on the same devices",
        ),
        (
            rollout.gpus_per_rank is None,
            "rollout.gpus_per_rank",
            rollout.gpus_per_rank,
            "left out",
            "rollouts use the trainer's GPUs",
        ),
        (
            not rollout.autoscale,
            "rollout.autoscale",
            rollout.autoscale,
            "left out",
            "there are as many as share devices",
        ),
        (not rollout.sizes, "rollout.sizes", rollout.sizes, "left out", "each takes the GPUs of as many trainer ranks"),
    ):
        if not fits:
            raise ConfigError(
                f"{key} is {value}, and with trainer.colocate it has to be {wanted}: {why}.",
                part=_PART,
                hint=f"Change {key}, or leave out trainer.colocate.",
            )
    return rollout.model_copy(update={"sleeps": True})


def refuse_colocation(trainer: TrainerConfig, command: str) -> None:
    """Raise `ConfigError` if a command that has no turns is to take some."""
    if trainer.colocate:
        raise ConfigError(
            f"trainer.colocate is for the loop of weightlane train, and weightlane {command} has none.",
            part=_PART,
            hint="Leave it out.",
        )
