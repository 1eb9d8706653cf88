"""Runs Python code of a model in a process of its own, with limits.

The process gets at most so much time, memory and output, an empty folder that is removed afterwards, no environment variables,
and no standard input. Where the system allows unprivileged namespaces (``unshare``), it also has no network, sees no other
process, and everything that it starts ends with it. It runs as the user of the run, and can read every file that this user can
read. This bounds mistakes, and is no protection from code that means harm: run such code in a container or a virtual machine.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

from pydantic import Field

from weightlane.ckpt_engines import ConfigError

from ..contract import Options

_PART = "environment sandbox"
_NAMESPACES = ("--user", "--map-current-user", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
_READ_BYTES = 65536
_BOOTSTRAP = """
import resource, sys
seconds, memory, size = map(int, sys.argv[1:4])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
code = sys.stdin.read()
sys.argv[:] = ["code"]
try:
    exec(compile(code, "code", "exec"), {"__name__": "__main__"})
except Exception as error:
    import traceback
    traceback.print_exception(type(error), error, error.__traceback__.tb_next)
    sys.exit(1)
"""
"""Sets the limits, which the code cannot raise again, before it reads the code."""


class SandboxLimits(Options):
    """Limits of one execution."""

    seconds: float = Field(default=10.0, gt=0, description="Most seconds.")
    memory_mib: int = Field(default=512, ge=64, description="Most MiB of address space of each process.")
    output_chars: int = Field(default=4000, ge=1, description="Most characters of output; the rest is not read.")
    file_mib: int = Field(default=16, ge=0, description="Most MiB of a file that it writes.")
    isolate: bool = Field(
        default=True,
        description="Refuse to start where the system does not allow namespaces; false: go on with a network, and without"
        " an end of processes that leave their group.",
    )


@functools.cache
def can_isolate() -> bool:
    """Whether this system lets a process have namespaces of its own."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    command = [unshare, *_NAMESPACES, "true"]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=20, check=False)  # noqa: S603 - no input of others
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0


def check_sandbox(limits: SandboxLimits) -> None:
    """Raise `ConfigError` if `limits` ask for isolation and this system has none."""
    if limits.isolate and not can_isolate():
        raise ConfigError(
            "this system does not let a process have namespaces of its own, so code would have the network.",
            part=_PART,
            hint="Allow unprivileged user namespaces, or accept it by environment.options.python.isolate = false.",
        )


async def run_python(code: str, limits: SandboxLimits) -> str:
    """Run `code` as a program, and return what it prints, errors included, within `limits`. The code makes it raise nothing."""
    with tempfile.TemporaryDirectory(prefix="weightlane-sandbox-", ignore_cleanup_errors=True) as folder:
        return await _run_in(folder, code, limits)


async def _run_in(folder: str, code: str, limits: SandboxLimits) -> str:
    numbers = [int(limits.seconds) + 1, limits.memory_mib << 20, limits.file_mib << 20]
    command = [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, *map(str, numbers)]
    if limits.isolate:
        command = ["unshare", *_NAMESPACES, "--", *command]
    process = None
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": folder},
            start_new_session=True,
        )
        return await _output(process, code, limits)
    finally:
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # Else `wait` would wait for processes that have left the group, too, which may have the other end.
            process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
            with suppress(Exception):
                await asyncio.shield(process.wait())


async def _output(process: asyncio.subprocess.Process, code: str, limits: SandboxLimits) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    written, most = b"", 4 * limits.output_chars  # a character has at most four bytes
    ending = ""
    try:
        async with asyncio.timeout(limits.seconds):
            with suppress(ConnectionError):  # it may have ended before it read all
                process.stdin.write(code.encode())
                await process.stdin.drain()
            process.stdin.close()
            while len(written) <= most and (more := await process.stdout.read(_READ_BYTES)):
                written += more
            if len(written) <= most:
                status = await process.wait()
                ending = f"\nexit status {status}" if status else ""
    except TimeoutError:
        ending = f"\nended after {limits.seconds:g} s"
    text = written.decode(errors="replace")
    if len(text) > limits.output_chars:
        ending, text = f"\noutput cut after {limits.output_chars} characters{ending}", text[: limits.output_chars]
    return (text.rstrip("\n") + ending).lstrip("\n")
