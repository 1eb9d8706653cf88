"""The roles that a configuration needs, and the algorithm over them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weightlane.ckpt_engines import ConfigError

from ..config import TrainerConfig
from ..dispatch.dispatch import WorkerDispatch
from ..dispatch.role_spec import RoleSpec
from ..objectives.config import AlgorithmConfig, CriticConfig, ReferenceConfig
from ..objectives.loss import Loss
from ..objectives.named import Objective
from ..objectives.value import value_loss
from .policy_gradient import PolicyGradient
from .ppo import Ppo, critic_state
from .reference_refresh import ReferenceRefresh, reference_state
from .roles import CRITIC, OBJECTIVE, POLICY, REFERENCE

_STAYS = ReferenceConfig()


def role_names(algorithm: AlgorithmConfig) -> list[str]:
    """The roles that `algorithm` needs."""
    needed = {POLICY: True, CRITIC: algorithm.objective == "ppo", REFERENCE: algorithm.needs_reference}
    return [name for name, is_needed in needed.items() if is_needed]


def check_roles(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> None:
    """Raise `ConfigError` if the ranks of `trainer` cannot host all roles of `algorithm`, or `trainer` configures no policy.

    A frozen model, or one with another head than ``tokens``, is no policy.
    """
    names = role_names(algorithm)
    if trainer.frozen:
        raise ConfigError(
            "trainer.frozen is true, and this run would train nothing.", part="algorithm", hint="Leave it out."
        )
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
    reference: ReferenceConfig = _STAYS,
    *,
    seed: int = 0,
    state: Path | None = None,
) -> list[RoleSpec]:
    """The roles of a run, all on the ranks of `trainer`.

    `models` are directories by role; a role that is missing starts from the policy's. `objective` is the policy's loss, and
    `state` its saved training state to resume from, with those of the critic and a refreshed reference next to it.
    """
    losses: dict[str, dict[str, Loss]] = {
        POLICY: {OBJECTIVE: objective},
        CRITIC: {OBJECTIVE: value_loss(algorithm)},
        REFERENCE: {},
    }
    states: dict[str, Path | None] = dict.fromkeys(losses)
    if state is not None:
        refreshed = reference_state(state) if reference.refresh_every else None
        states = {POLICY: state, CRITIC: critic_state(state), REFERENCE: refreshed}
    return [
        RoleSpec(
            name,
            role_trainer(name, trainer, critic),
            models.get(name, models[POLICY]),
            losses[name],
            seed,
            state=states[name],
        )
        for name in role_names(algorithm)
    ]


def role_trainer(role: str, trainer: TrainerConfig, critic: CriticConfig) -> TrainerConfig:
    """The engine settings of a role, on the ranks of `trainer`."""
    if role == POLICY:
        return trainer
    whole = trainer.model_copy(update={"lora": None})  # only the policy has the adapter
    own = {"head": "value", "learning_rate": critic.learning_rate} if role == CRITIC else {"frozen": True}
    return whole.model_copy(update=own)


def policy_objective(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """The settings of the policy's loss. PPO's KL penalty is part of the rewards, so its loss has none."""
    return algorithm.model_copy(update={"kl_coefficient": 0.0}) if algorithm.objective == "ppo" else algorithm


def algorithm_over(
    dispatch: WorkerDispatch,
    algorithm: AlgorithmConfig,
    reference: ReferenceConfig = _STAYS,
    directory: Path = Path("reference"),
) -> PolicyGradient:
    """The algorithm that `algorithm` names, over the roles of `role_specs`.

    A reference that `reference` refreshes passes through `directory`, which all ranks share; nothing stays there.
    """
    every = reference.refresh_every * algorithm.updates_per_batch
    refresh = ReferenceRefresh(every, directory.resolve()) if every else None
    made = Ppo if CRITIC in role_names(algorithm) else PolicyGradient
    return made(dispatch, algorithm, refresh)
