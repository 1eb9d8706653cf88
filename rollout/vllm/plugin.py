"""The entry point ``vllm.general_plugins``, which makes any vLLM, including a stock server, a possible rollout replica.

vLLM calls `register` in every vLLM process before the model is built, in some processes more than once.
"""

from __future__ import annotations

from .. import vllm_cpu, vllm_surface
from .watchdog import watch_parent


def register() -> None:
    """Register the weight-transfer engine ``weightlane`` by name; its module is imported when a config asks for it.

    Never raises, since a vLLM that does not use weightlane must start anyway. A vLLM that does use it is refused when it
    connects; see `weightlane.rollout.vllm_surface`.
    """
    watch_parent()
    try:
        _register()
    except Exception as error:  # noqa: BLE001 - an unknown vLLM may raise anything
        vllm_surface.failures.append(error)


def _register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: PLC0415 - vLLM is here
    from vllm.platforms import current_platform  # noqa: PLC0415

    from . import commit_in_core, start_failures  # noqa: PLC0415 - these import vLLM's engine

    try:
        WeightTransferEngineFactory.register_engine(
            vllm_surface.BACKEND, "weightlane.rollout.vllm.transfer_engine", "WeightlaneTransferEngine"
        )
    except ValueError:  # Registered by an earlier call in this process.
        return
    commit_in_core.install()
    start_failures.install()
    if current_platform.is_cpu():
        vllm_cpu.install()
