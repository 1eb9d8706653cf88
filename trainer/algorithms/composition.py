"""The roles that a configuration needs, and the algorithm over them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weightlane.ckpt_engines import ConfigError

from ..config import AlgorithmConfig, CriticConfig, TrainerConfig
from ..dispatch.dispatch import WorkerDispatch
from ..dispatch.role import RoleSpec
from ..objectives.named import Objective
from ..objectives.value import value_loss
from .policy_gradient import PolicyGradient
from .ppo import Ppo, critic_state
from .roles import CRITIC, OBJECTIVE, POLICY, REFERENCE


def role_names(algorithm: AlgorithmConfig) -> list[str]:
    """The roles that `algorithm` needs."""
    needed = {POLICY: True, CRITIC: algorithm.objective == "ppo", REFERENCE: algorithm.needs_reference}
    return [name for name, is_needed in needed.items() if is_needed]


def check_roles(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> None:
    """Raise `ConfigError` where the ranks of `trainer` cannot host all roles that `algorithm` needs, or the policy is none."""
    names = role_names(algorithm)
    if trainer.head != "tokens":
        raise ConfigError(
            f"the policy has trainer.head = {trainer.head}, and could not generate.",
            part="algorithm",
            hint='Leave trainer.head out. A critic is added by algorithm.objective = "ppo".',
        )
    if len(names) > 1 and trainer.engine == "megatron":
        raise ConfigError(
            f"this run needs the roles {', '.join(names)} on the trainer ranks, and the megatron engine hosts one.",
            part="algorithm",
            hint="Set trainer.engine = fsdp2, or algorithm.objective and kl_coefficient to what needs the policy alone.",
        )


def role_specs(
    algorithm: AlgorithmConfig,
    trainer: TrainerConfig,
    critic: CriticConfig,
    models: Mapping[str, Path],
    objective: Objective,
    *,
    seed: int = 0,
    state: Path | None = None,
) -> list[RoleSpec]:
    """The roles of a run, all on the ranks of `trainer`.

    Args:
        algorithm: The objective and its settings.
        trainer: Engine and ranks of every role.
        critic: Settings that the critic has of its own.
        models: A model directory for each of `role_names`.
        objective: The policy's loss.
        seed: Seed of every rank.
        state: The policy's saved training state to resume from; that of the critic lies beside it.
    """
    whole = trainer.model_copy(update={"lora": None})  # the adapter is the policy's
    valued = whole.model_copy(update={"head": "value", "learning_rate": critic.learning_rate})
    specs = {
        POLICY: RoleSpec(POLICY, trainer, models[POLICY], {OBJECTIVE: objective}, seed, state=state),
        CRITIC: RoleSpec(
            CRITIC,
            valued,
            models.get(CRITIC, models[POLICY]),
            {OBJECTIVE: value_loss(algorithm)},
            seed,
            state=None if state is None else critic_state(state),
        ),
        REFERENCE: RoleSpec(REFERENCE, whole, models.get(REFERENCE, models[POLICY]), seed=seed, trained=False),
    }
    return [specs[name] for name in role_names(algorithm)]


def policy_objective(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """The settings of the policy's loss: PPO's penalty for leaving the reference is in the rewards, and not in the loss, too."""
    return algorithm.model_copy(update={"kl_coefficient": 0.0}) if algorithm.objective == "ppo" else algorithm


def algorithm_over(dispatch: WorkerDispatch, algorithm: AlgorithmConfig) -> PolicyGradient:
    """The algorithm that `algorithm` names, over the roles of `role_specs`."""
    return Ppo(dispatch, algorithm) if CRITIC in role_names(algorithm) else PolicyGradient(dispatch)
