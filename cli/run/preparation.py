"""Checks everything that a run needs before it starts a process or writes a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightlane.ckpt_engines import ConfigError
from weightlane.rollout.layout.loading.adapter_tensors import adapted_layers
from weightlane.trainer.algorithms.composition import check_roles, policy_objective, role_names, role_trainer
from weightlane.trainer.algorithms.roles import CRITIC, POLICY, REFERENCE
from weightlane.trainer.data.rewards import Reward
from weightlane.trainer.data.tasks import Task, load_splits
from weightlane.trainer.data.tokenizer import HfTokenizer
from weightlane.trainer.engines.hf.model_dir import ModelInfo, check_model_dir, find_model
from weightlane.trainer.engines.registry import training_engine_class
from weightlane.trainer.objectives.named import Objective

from ..config.run_config import RunConfig, check_engine, load_config


@dataclass(frozen=True, slots=True)
class Preparation:
    """The checked configuration of a run, and everything that it names."""

    config: RunConfig
    model: ModelInfo
    role_models: Mapping[str, Path]
    """Absolute model directory of each role that the algorithm needs."""
    tokenizer: HfTokenizer
    train_tasks: Sequence[Task]
    heldout_tasks: Sequence[Task]
    reward: Reward
    objective: Objective


def prepare(path: Path, overrides: Sequence[str]) -> Preparation:
    """Read the configuration at the absolute `path`, and everything that it names. Raises a typed error for the first problem."""
    config = load_config(path, overrides)
    check_roles(config.algorithm, config.trainer)
    training_engine = training_engine_class(config.trainer.engine)
    if not config.ray.address:  # with an address, its processes run on other machines
        check_engine(config)
    model = check_model_dir(find_model(config.model.path))
    if config.rollout.adapter is not None:
        adapted_layers(model.path, config.rollout.adapter)
    role_models = _role_models(config, model)
    for role, role_model in role_models.items():
        training_engine.check(role_trainer(role, config.trainer, config.critic), role_model)
    tokenizer = HfTokenizer(model.path, begins=config.data.special_tokens and not config.data.chat)
    train_tasks, heldout_tasks = load_splits(config.data, tokenizer.as_chat)
    own_modules = [path.parent, Path()]
    reward = Reward(config.reward.function, own_modules, config.reward.time_limit_s)
    objective = Objective(policy_objective(config.algorithm), own_modules)
    return Preparation(config, model, role_models, tokenizer, train_tasks, heldout_tasks, reward, objective)


def _role_models(config: RunConfig, model: ModelInfo) -> dict[str, Path]:
    """The model directory of each role. Raises `ConfigError` for one with another vocabulary than the policy's."""
    paths = {POLICY: "", CRITIC: config.critic.path, REFERENCE: config.reference.path}
    found = {}
    for role in role_names(config.algorithm):
        info = model
        if paths[role]:
            info = check_model_dir(find_model(paths[role]), "value" if role == CRITIC else "tokens")
        if info.vocab_size != model.vocab_size:
            raise ConfigError(
                f"the {role} has {info.vocab_size} tokens, and the policy {model.vocab_size}.",
                part="model",
                hint=f"Set {role}.path to a model with the policy's tokenizer, or leave it out.",
            )
        found[role] = info.path.resolve()
    return found
