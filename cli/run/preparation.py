"""Checks everything that a run needs before it starts a process or writes a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.data.rewards import Reward
from weightlane.trainer.data.tasks import Task, load_splits
from weightlane.trainer.data.tokenizer import HfTokenizer
from weightlane.trainer.engines.hf.model_dir import ModelInfo, check_model_dir, find_model
from weightlane.trainer.engines.registry import training_engine_class
from weightlane.trainer.objectives.named import Objective

from ..config import RunConfig, check_engine, load_config


@dataclass(frozen=True, slots=True)
class Preparation:
    """The checked configuration of a run, and everything that it names."""

    config: RunConfig
    model: ModelInfo
    tokenizer: HfTokenizer
    train_tasks: Sequence[Task]
    heldout_tasks: Sequence[Task]
    reward: Reward
    objective: Objective


def prepare(path: Path, overrides: Sequence[str]) -> Preparation:
    """Read the configuration at the absolute `path`, and everything that it names. Raises a typed error for the first problem."""
    config = load_config(path, overrides)
    if config.algorithm.kl_coefficient:
        raise ConfigError(
            "algorithm.kl_coefficient needs log-probabilities of a reference policy, which weightlane train does not compute.",
            part="algorithm",
            hint="Set it to 0, or train from Python with reference_logprobs in the batch: docs/guides/objectives.md.",
        )
    training_engine = training_engine_class(config.trainer.engine)
    if not config.ray.address:  # with an address, its processes run on other machines
        check_engine(config)
    model = check_model_dir(find_model(config.model.path))
    training_engine.check(config.trainer, model.path)
    tokenizer = HfTokenizer(model.path)
    train_tasks, heldout_tasks = load_splits(config.data, tokenizer.as_chat)
    own_modules = [path.parent, Path()]
    reward = Reward(config.reward.function, own_modules, config.reward.time_limit_s)
    objective = Objective(config.algorithm, own_modules)
    return Preparation(config, model, tokenizer, train_tasks, heldout_tasks, reward, objective)
