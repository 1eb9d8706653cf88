"""Exit codes of the command, by which a scheduler can distinguish a typing error from a lost machine."""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from weightlane.ckpt_engines import (
    AddressInUseError,
    ConfigError,
    EngineUnavailableError,
    PeerLostError,
    RegistryError,
    SyncAbortedError,
    WeightlaneError,
    WorkerDiedError,
)

from .extras import error_for

FAILED = 1
"""A run, a check or a measurement started and failed."""
REFUSED = 2
"""The command line or the configuration is wrong or impossible here. Nothing started, and a retry changes nothing."""
PROCESS_LOST = 3
"""A process or a machine of the run is lost. A retry may help, with ``--resume`` if there is a saved state."""
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

_REFUSALS = (ConfigError, RegistryError, EngineUnavailableError, AddressInUseError)
_LOSSES = (WorkerDiedError, PeerLostError)


def exit_code_of(error: WeightlaneError) -> int:
    """Return the exit code of a command that ends with `error`."""
    while isinstance(error, SyncAbortedError) and error.reason is not None:
        error = error.reason
    if isinstance(error, _LOSSES):
        return PROCESS_LOST
    return REFUSED if isinstance(error, _REFUSALS) else FAILED


class _TerminatedError(BaseException):
    """The process got SIGTERM. Like `KeyboardInterrupt` for Ctrl-C."""


class Commands(TyperGroup):
    """Reports every expected error as one line on standard error and an exit code. Typer reports wrong usage."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that `args` name. For ``serve``, vLLM's word for a server, the error names ``weightlane tinker``."""
        if args[:1] == ["serve"]:
            ctx.fail(
                "No such command 'serve'. The service for programs of the Tinker SDK is 'weightlane tinker CONFIG'."
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the click context `ctx` names."""
        try:
            return super().invoke(ctx)
        except WeightlaneError as error:
            _tell(error)
            raise typer.Exit(exit_code_of(error)) from error
        except ImportError as error:
            if (told := error_for(error, ctx.invoked_subcommand or "")) is None:
                raise
            _tell(told)
            raise typer.Exit(REFUSED) from error
        except KeyboardInterrupt:
            typer.echo("interrupted; everything this run started has ended", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except _TerminatedError:
            raise _terminated_exit() from None
        except BaseException as error:
            if not _is_cancelled(error):
                raise
            raise _terminated_exit() from None


def _tell(error: WeightlaneError) -> None:
    from rich.text import Text  # noqa: PLC0415 - for errors only

    from .output import console  # noqa: PLC0415

    console(stderr=True).print(Text.assemble(("error:", "bold red"), f" {error}"))


def _is_cancelled(error: BaseException) -> bool:
    """Whether `error` is asyncio's, which commands get only by SIGTERM. Imports nothing, because asyncio is slow to import."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and isinstance(error, asyncio.CancelledError)


def _terminated_exit() -> typer.Exit:
    typer.echo("terminated; everything this run started has ended", err=True)
    return typer.Exit(TERMINATED)


def end_by_sigterm() -> None:
    """Let SIGTERM end the command as Ctrl-C does, from now on."""
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(*_: object) -> NoReturn:
    raise _TerminatedError
