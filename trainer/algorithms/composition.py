"""The roles that a configuration needs, the ranks that they are on, and the algorithm over them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weightlane.ckpt_engines import ConfigError

from ..config import TrainerConfig
from ..dispatch.dispatch import WorkerDispatch
from ..dispatch.role_spec import POLICY_GROUP, RoleSpec
from ..engines.registry import check_trainer
from ..objectives.config import AlgorithmConfig, CriticConfig, ReferenceConfig
from ..objectives.loss import Loss
from ..objectives.named import Objective
from ..objectives.value import value_loss
from .policy_gradient import PolicyGradient, ReferenceRefresh, reference_state
from .ppo import Ppo, critic_state
from .roles import CRITIC, OBJECTIVE, POLICY, REFERENCE

_CRITIC, _STAYS = CriticConfig(), ReferenceConfig()


def role_names(algorithm: AlgorithmConfig) -> list[str]:
    """The roles that `algorithm` needs."""
    needed = {POLICY: True, CRITIC: algorithm.objective == "ppo", REFERENCE: algorithm.needs_reference}
    return [name for name, is_needed in needed.items() if is_needed]


def check_roles(
    algorithm: AlgorithmConfig,
    trainer: TrainerConfig,
    critic: CriticConfig = _CRITIC,
    reference: ReferenceConfig = _STAYS,
) -> None:
    """Raise `ConfigError` if `trainer` configures no policy, or a role that `algorithm` does not need has ranks.

    A frozen model, or one with another head than ``tokens``, is no policy.
    """
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
    for role, ranks, needed_by in (
        (CRITIC, critic.ranks, 'algorithm.objective = "ppo"'),
        (REFERENCE, reference.ranks, "algorithm.kl_coefficient above 0"),
    ):
        if ranks and role not in role_names(algorithm):
            raise ConfigError(
                f"{role}.ranks is {ranks}, and only a run with {needed_by} has a {role}.",
                part="algorithm",
                hint=f"Leave out {role}.ranks, or add the {role}.",
            )


def check_models(
    models: Mapping[str, Path], trainer: TrainerConfig, critic: CriticConfig, reference: ReferenceConfig, *, here: bool
) -> None:
    """Raise the `ConfigError` with which the ranks of any role would refuse its model: see `check_trainer`."""
    for role, model in models.items():
        settings = role_trainer(role, trainer, critic, reference)
        try:
            check_trainer(settings, model, here=here)
        except ConfigError as error:
            if settings.ranks == trainer.ranks:
                raise
            # Engines know the one setting that they are given.
            message, hint = (text.replace("trainer.ranks", f"{role}.ranks") for text in (error.message, error.hint))
            problem = f"{role}.ranks is {settings.ranks}, with which the settings of trainer do not work: {message}"
            raise ConfigError(problem, part=error.part, hint=hint) from error


def rank_groups(
    algorithm: AlgorithmConfig, trainer: TrainerConfig, critic: CriticConfig, reference: ReferenceConfig
) -> dict[str, TrainerConfig]:
    """The groups of ranks of a run by name, each with the engine settings of its first role."""
    found: dict[str, TrainerConfig] = {}
    for role in role_names(algorithm):
        found.setdefault(_group(role, critic, reference), role_trainer(role, trainer, critic, reference))
    return found


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
    """The roles of a run, on the groups of `rank_groups`.

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
            role_trainer(name, trainer, critic, reference),
            models.get(name, models[POLICY]),
            losses[name],
            seed,
            _group(name, critic, reference),
            states[name],
        )
        for name in role_names(algorithm)
    ]


def role_trainer(
    role: str, trainer: TrainerConfig, critic: CriticConfig, reference: ReferenceConfig = _STAYS
) -> TrainerConfig:
    """The engine settings of a role: those of `trainer`, but for what makes it this role, and its number of ranks."""
    if role == POLICY:
        return trainer
    # Only the policy has the adapter, and the experts that the rollout chose.
    whole = trainer.model_copy(update={"lora": None, "router_replay": False})
    own = {"head": "value", "learning_rate": critic.learning_rate} if role == CRITIC else {"frozen": True}
    return whole.model_copy(update={**own, "ranks": _own_ranks(role, critic, reference) or trainer.ranks})


def _own_ranks(role: str, critic: CriticConfig, reference: ReferenceConfig) -> int:
    """The number of ranks that a role has for itself; 0 if it is on the policy's."""
    return {CRITIC: critic.ranks, REFERENCE: reference.ranks}.get(role, 0)


def _group(role: str, critic: CriticConfig, reference: ReferenceConfig) -> str:
    """The group of ranks that hosts a role. Its own one is called like the role."""
    return role if _own_ranks(role, critic, reference) else POLICY_GROUP


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
