"""`configuration`: reads the configuration of an environment of verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf

from weightlane.ckpt_engines import ConfigError

PART = "environment verifiers"
"""The part that errors name."""


def configuration(given: Mapping[str, Any]) -> vf.EnvConfig:
    """Return the configuration that the table `given` describes, as verifiers' own commands read it from ``[env]``.

    Raises `ConfigError` if a package that it names cannot be imported, or an option is wrong.
    """
    try:
        return vf.resolve_env_config(dict(given))
    except Exception as cause:  # an import runs the environment's own code
        named = dict(given).get("taskset")
        name = named.get("id") if isinstance(named, Mapping) else named
        raise ConfigError(
            f"verifiers cannot configure the environment {name!r}: {type(cause).__name__}: {cause}",
            part=PART,
            hint="Install its package beside weightlane, in the Python of the run, or correct the table [env].",
        ) from cause


def with_chat(given: Mapping[str, Any]) -> vf.EnvConfig:
    """As `configuration`; `Chat` plays each role for which neither the table nor the taskset names a harness."""
    config, table = configuration(given), dict(given)
    if vf.default_harness_id(config.taskset.id) == "bash":
        chat = {"harness": {"id": "weightlane_verifiers"}, "runtime": {"type": "subprocess"}}
        for role, agent in config:
            if isinstance(agent, vf.AgentConfig) and agent.harness is None:
                table[role] = {**chat, **table.get(role, {})}
    return configuration(table)
