"""The entry point ``vllm.general_plugins``, which makes any vLLM, including a stock server, a possible rollout replica.

vLLM calls `register` in every vLLM process before the model is built, in some processes more than once.
"""

from __future__ import annotations

from contextlib import suppress

from .. import vllm_cpu, vllm_surface
from .watchdog import watch_parent


def register() -> None:
    """Register the weight-transfer engines ``weightlane`` of rollout and trainer by name; each is imported on demand.

    Never raises, since a vLLM that does not use weightlane must start anyway. A vLLM that does use it is refused when it
    connects; see `weightlane.rollout.vllm_surface`.
    """
    watch_parent()
    try:
        _register()
    except Exception as error:  # noqa: BLE001 - an unknown vLLM may raise anything
        vllm_surface.failures.append(error)


def _register() -> None:
    from vllm.distributed.weight_transfer import factory  # noqa: PLC0415 - vLLM is here
    from vllm.platforms import current_platform  # noqa: PLC0415

    from . import commit_in_core, start_failures, version_stamps  # noqa: PLC0415 - these import vLLM's engine

    try:
        factory.WeightTransferEngineFactory.register_engine(
            vllm_surface.BACKEND, "weightlane.rollout.vllm.transfer_engine", "WeightlaneTransferEngine"
        )
    except ValueError:  # Registered by an earlier call in this process.
        return
    with suppress(ValueError):  # Registered by an import of that package.
        factory.WeightTransferTrainerFactory.register_engine(
            vllm_surface.BACKEND, "weightlane.rollout.vllm_trainer", "WeightlaneTrainerWeightTransferEngine"
        )
    commit_in_core.install()
    start_failures.install()
    version_stamps.install()
    if current_platform.is_cpu():
        vllm_cpu.install()
