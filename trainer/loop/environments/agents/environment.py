"""`Agent`: an environment in which an agent that knows only OpenAI's API plays the episodes, over an endpoint of the run."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from weightlane.ckpt_engines import ConfigError, EpisodeError
from weightlane.ckpt_engines.runtime.threads import DaemonThreads
from weightlane.ckpt_engines.toolkit import one_address

from ....data.named_function import function_named
from ..contract import Environment, EnvironmentContext, EpisodeView, Message, Options, Verdict
from ..tools.calls import Parser, parser_named
from .programs import Ended, Programs
from .session import Session

if TYPE_CHECKING:
    from .endpoint import Endpoint

_PART = "environment agent"


class AgentOptions(Options):
    """Options of the environment ``agent``. Either `command` or `function` says what the agent is."""

    command: tuple[str, ...] = Field(
        default=(),
        description="Program and arguments, started for each episode in the configuration file's folder. {KEY} in an argument is"
        " that key of the task; the whole task is a line of JSON on its standard input. python is the run's own.",
    )
    preload: tuple[str, ...] = Field(
        default=(),
        description="Modules that are imported once, if command is python SCRIPT ...: each episode then begins with a fork"
        " instead of a start of Python. They must not start threads.",
    )
    function: str | None = Field(
        default=None,
        description="'module:function', called as function(task, client) in the run's process, in a thread unless it is async."
        " client are the arguments of openai.OpenAI or AsyncOpenAI.",
    )
    reward: Literal["function", "agent"] = Field(
        default="function",
        description="function: reward.function judges the last reply. agent: the agent does, by the last line that its program"
        ' prints, a number or {"reward": ..., NAME: a metric, ...}, or by what its function returns.',
    )
    format: str = Field(
        default="hermes", description="How the model writes tool calls; see the option of the environment tools."
    )
    other_sampling: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="What becomes of a call with another temperature or other sampling parameters than the run's. ignore: it is"
        " sampled as the run samples.",
    )
    host: Annotated[str, AfterValidator(one_address)] = Field(
        default="127.0.0.1",
        description="Address on which the endpoint listens, and at which agents find it. Beyond loopback, whoever reads the"
        " network reads the keys: use a private one.",
    )
    port: int = Field(default=0, ge=0, le=65535, description="Its port; 0 chooses a free one.")


class Agent(Environment):
    """Has an agent play each episode. Its calls are the turns: each is known by a key that is the episode's own.

    The agent finds the endpoint by ``OPENAI_BASE_URL``, and its key in ``OPENAI_API_KEY``.
    """

    options_type = AgentOptions
    options: AgentOptions

    def __init__(self, options: AgentOptions, context: EnvironmentContext) -> None:
        super().__init__(options, context)
        self._folder = Path(*context.search_path[:1]).absolute()
        if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
            raise ConfigError(
                f"its endpoint needs {' and '.join(missing)}.", part=_PART, hint="pip install 'weightlane[service]'"
            )
        self.needs_reward = options.reward == "function"
        self._function = self._checked(options)
        self._parsers: dict[str, Parser] = {}
        self._parser_of(())
        self._endpoint: Endpoint | None = None
        self._programs = Programs(options.preload)
        # No limit: an agent beyond its time is left behind, and must not keep others waiting.
        self._threads = DaemonThreads(sys.maxsize, "weightlane-agent")

    async def play(self, task: Mapping[str, Any], episode: EpisodeView) -> Verdict:
        """See `Environment.play`."""
        if self._endpoint is None:
            self._endpoint = self._started()
        session = Session(episode, self._parser_of)
        with self._endpoint.serving(session) as key:
            client = {"base_url": self._endpoint.base_url, "api_key": key}
            result = await self._until_failure(session, self._run(task, client, session))
        if session.last is None:
            raise EpisodeError("the agent ended without a call.", part=_PART)
        if self.options.reward == "function":
            return Verdict(await episode.judge(session.last))
        return self._verdict(result, session)

    async def close(self) -> None:
        """See `Environment.close`."""
        self._threads.shutdown()
        await asyncio.to_thread(self._programs.close)
        if self._endpoint is not None:
            await self._endpoint.close()

    def _checked(self, options: AgentOptions) -> Callable[..., Any] | None:
        """Return the function. Raises `ConfigError` if there is not one agent, or it cannot be found."""
        if bool(options.command) == bool(options.function):
            raise ConfigError(
                "an agent is a command or a function.",
                part=_PART,
                hint="Set one of environment.options.command and environment.options.function.",
            )
        if options.function is not None:
            found: Callable[..., Any] = function_named(
                options.function, self.context.search_path, part=_PART, setting="environment.options.function"
            )
            return found
        program = self._program(options.command[0])
        if shutil.which(program) is None:
            raise ConfigError(
                f"there is no program {program!r}.", part=_PART, hint="Correct environment.options.command."
            )
        script = options.command[1] if len(options.command) > 1 else ""
        if options.preload and not (options.command[0] == "python" and (self._folder / script).is_file()):
            raise ConfigError(
                f"environment.options.preload is for a command that is python and a script in {self._folder}.",
                part=_PART,
                hint="Leave it out.",
            )
        return None

    def _started(self) -> Endpoint:
        from .endpoint import Endpoint  # noqa: PLC0415 - has an HTTP server

        options, model_dir = self.options, self.context.model_dir
        if options.function is not None:  # its client reads the variables of this process
            os.environ.update(_without_proxy(options.host))
        return Endpoint(
            options.host,
            options.port,
            model=model_dir.name if model_dir else "policy",
            temperature=self.context.temperature,
            ignores_sampling=options.other_sampling == "ignore",
        )

    def _parser_of(self, tools: Sequence[Message]) -> Parser:
        key = json.dumps(tools, sort_keys=True)
        if key not in self._parsers:
            if len(self._parsers) > 1000:  # noqa: PLR2004 - tools of their own for every task
                self._parsers.clear()
            self._parsers[key] = parser_named(
                self.options.format, self.context.search_path, self.context.model_dir, tools
            )
        return self._parsers[key]

    async def _until_failure(self, session: Session, agent: Any) -> Any:
        """Return the agent's result, or end it and raise the error when a reply has failed."""
        running = asyncio.ensure_future(agent)
        session.failed = running.cancel
        try:
            return await running
        except asyncio.CancelledError:
            if session.failure is None or not running.cancelled():
                raise
        except Exception:
            if session.failure is None:
                raise
        raise session.failure

    async def _run(self, task: Mapping[str, Any], client: Mapping[str, str], session: Session) -> Any:
        """Run the agent to its end. Returns what it returns or prints. Raises `EpisodeError` if its program failed."""
        if self._function is None:
            return self._printed(await self._run_program(task, client), session)
        if inspect.iscoroutinefunction(self._function):
            call: Any = self._function(task, client)
        else:
            call = asyncio.wrap_future(self._threads.submit(partial(self._function, task, client)))
        try:
            return await call
        except (Exception, SystemExit) as raised:
            if session.cut_short:
                return None
            if isinstance(raised, SystemExit):  # asyncio would end the run with it
                raise EpisodeError(f"the agent left by exit({raised.code!r}).", part=_PART) from raised
            raise

    async def _run_program(self, task: Mapping[str, Any], client: Mapping[str, str]) -> Ended:
        command = [_filled(part, task) for part in self.options.command]
        command[0] = self._program(command[0])
        environment = {
            **os.environ,
            **_without_proxy(self.options.host),
            "OPENAI_BASE_URL": client["base_url"],
            "OPENAI_API_KEY": client["api_key"],
        }
        return await self._programs.run(command, environment, f"{json.dumps(task, default=str)}\n", self._folder)

    def _program(self, name: str) -> str:
        if name == "python":
            return sys.executable
        return str(self._folder / name) if os.sep in name else name

    def _printed(self, ended: Ended, session: Session) -> Any:
        if ended.status:
            if session.cut_short:
                return None  # what it printed last was no reward
            last = ended.err.strip().splitlines()[-1:] or ["it printed no error."]
            raise EpisodeError(f"the agent ended with status {ended.status}: {last[0]}", part=_PART)
        last = ended.out.strip().splitlines()[-1:]
        try:
            return json.loads(last[0]) if last else None
        except ValueError:
            return None

    def _verdict(self, result: Any, session: Session) -> Verdict:
        if isinstance(result, Verdict):
            return result
        told = dict(result) if isinstance(result, dict) else {"reward": result}
        reward = told.pop("reward", None)
        if isinstance(reward, Real):
            return Verdict(float(reward), {k: float(v) for k, v in told.items() if isinstance(v, Real)})
        if session.cut_short:
            return Verdict(0.0)
        raise EpisodeError(
            f"the agent gave no reward, but {result!r}.",
            part=_PART,
            hint='Print a number, or {"reward": ...}, as the last line, or set environment.options.reward to "function".',
        )


def _without_proxy(host: str) -> dict[str, str]:
    """Return the variables by which a client calls `host`, and the hosts that are named already, without a proxy."""
    known = os.environ.get("NO_PROXY", os.environ.get("no_proxy", ""))
    hosts = known if host in known.split(",") else ",".join(filter(None, (known, host)))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def _filled(part: str, task: Mapping[str, Any]) -> str:
    """Put the task's values in the place of their keys in braces, once: what a value has in braces stays."""
    found = ""
    while part:
        before, brace, rest = part.partition("{")
        key, end, after = rest.partition("}")
        if not brace:
            return found + before
        if end and key in task:
            found, part = f"{found}{before}{task[key]}", after
        else:
            found, part = f"{found}{before}{{", rest
    return found
