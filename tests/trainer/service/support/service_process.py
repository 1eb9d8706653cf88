"""A running `service_program`, and clients of it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from fork_server import ForkedPopen
from ports import free_port
from waiting import HANG_S, wait_until

PROGRAM = Path(__file__).with_name("service_program.py")
SDK = Path(sys.prefix) / "tinker"
"""Where `.ci/setup-env` puts the public SDK."""
if str(SDK) not in sys.path:
    sys.path.append(str(SDK))  # last, so that it brings nothing that is there already
TOKENS = {"alice": "tml-alice", "bob": "tml-bob"}


def datums(rows: Sequence[tuple[list[int], list[float]]]) -> list[Any]:
    """Tokens, one more than the model reads, and a weight for each that is predicted, as the SDK takes them."""
    from tinker import types

    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
        )
        for tokens, weights in rows
    ]


class ServiceProcess:
    """The service, which can be killed and started again on the same directory.

    Args:
        model: Checkpoint.
        directory: The service's files.
        settings: See `service_program`.
    """

    def __init__(self, model: Path, directory: Path, **settings: Any) -> None:
        self.model, self.directory = model, directory
        tokens = directory.with_suffix(".tokens")
        tokens.write_text("".join(f"{name} {token}\n" for name, token in TOKENS.items()))
        # Clients come back to the port after a restart, so nobody else may get it meanwhile.
        self._settings = {"tokens_file": str(tokens), "port": free_port(), **settings}
        self.process: ForkedPopen | None = None
        self.url = ""
        self._clients: list[Any] = []

    def start(self) -> Self:
        port_file = self.directory.with_suffix(".port")
        port_file.unlink(missing_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        arguments = [str(self.model), str(self.directory), str(port_file), json.dumps(self._settings)]
        self.process = process = ForkedPopen([sys.executable, str(PROGRAM), *arguments], env=environment)
        wait_until(lambda: port_file.is_file() or process.poll() is not None, "the service started", poll_s=0.05)
        assert process.poll() is None, "the service ended while it started"
        self.url = f"http://127.0.0.1:{port_file.read_text()}"
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(HANG_S)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(HANG_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        for client in self._clients:  # each has threads that would go on calling
            with contextlib.suppress(Exception):
                client.close("success").result(HANG_S)
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def checkpoint(self, path: str) -> Path:
        """The folder of the checkpoint that clients know as `path`."""
        (found,) = self.directory.glob(f"checkpoints/{path.removeprefix('tinker://').replace(':', '.')}~*")
        return found

    def client(self, name: str = "alice") -> Any:
        """A `tinker.ServiceClient`."""
        import tinker

        made = tinker.ServiceClient(base_url=self.url, api_key=TOKENS[name])
        self._clients.append(made)
        return made
