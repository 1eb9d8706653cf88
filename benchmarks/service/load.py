"""Loads `weightlane tinker` with many clients of the public Tinker SDK, kills processes if asked to, and checks every bit.

    make demo                                              # makes the model
    python -m benchmarks.service.load --seconds 300        # 64 clients sample, 8 train
    python -m benchmarks.service.load --sampling 4 --training 2 --kills 30
    python -m benchmarks.service.load --sampling 0 --training 4 --seconds 30 --join    # beside --training 1

Clients that train take steps on batches of their own, and hand their new weights to clients that sample, who ask for one
completion after the other. With --kills, the service, a trainer rank or vLLM's engine is killed at random; the service is started
again by this program, the others by the service. Reported are the latencies of samples and steps, the largest gap without an
answer, and the memory of all processes of the service over time.

At the end, each client's weights are compared, bit for bit, with those of a client that took the same number of steps alone: a
step that was lost, or counted twice, or met another client's, would show. With --join the service computes requests of several
clients together, which rounds sums in another order; then the distance of the weights counts. The SDK must be installed
(``make setup`` does).
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.command import Report, finish, options_of, say, table
from weightlane.ckpt_engines import ConfigError

from .running import CALL_S, RANK, Service, distance, saved_tensors, take_step

BATCH = 8
CLOSE_ENOUGH = 1e-4
"""Largest distance of a client's weights with --join: what rounding may add up to over all steps."""
EXCHANGE_STEPS = 5
"""Steps after which a client that trains hands over new weights."""


@dataclass
class Clients:
    """Everything that all clients share, and that they saw."""

    trainings: list[Any]
    samplers: list[Any]
    counts: list[int]
    """Steps of each client that trains."""
    ended: threading.Event = field(default_factory=threading.Event)
    samples: list[tuple[float, float]] = field(default_factory=list)
    """End and seconds of every sampling request."""
    steps: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def run(self, work: Callable[[int], None], number: int) -> None:
        """Do a client's work until the end; note its error."""
        try:
            while not self.ended.is_set():
                work(number)
        except Exception as error:  # noqa: BLE001 - reported
            self.failures.append(f"{work.__name__} {number}: {type(error).__name__}: {error}")

    def train(self, number: int) -> None:
        """Take a step, and now and then hand over the weights."""
        training, began = self.trainings[number], time.monotonic()
        step_of(training, number, self.counts[number])
        self.steps.append((time.monotonic(), time.monotonic() - began))
        self.counts[number] += 1
        if self.counts[number] % EXCHANGE_STEPS == 0:
            self.samplers[number] = training.save_weights_and_get_sampling_client().result(CALL_S)

    def sample(self, number: int) -> None:
        """Ask for a completion."""
        from tinker import types

        params = types.SamplingParams(max_tokens=8, temperature=1.0)
        prompt, began = types.ModelInput.from_ints([3 + number % 10, 4, 5]), time.monotonic()
        self.samplers[number % len(self.samplers)].sample(prompt, 1, params).result(CALL_S)
        self.samples.append((time.monotonic(), time.monotonic() - began))


def step_of(training: Any, client: int, step: int) -> None:
    """A client's step, which its number and that of the step decide."""
    take_step(training, 1000 * client + step, BATCH, 1e-3 * (1 + client))


def load(service: Service, args: Any) -> Report:
    """Let clients work, and check what they got."""
    import tinker

    client = tinker.ServiceClient(base_url=service.url, api_key="tml-any")
    web = tinker.RestClient(base_url=service.url, api_key="tml-any")
    (model,) = web.get_server_capabilities().result().supported_models
    name = model.model_name
    trainings = [client.create_lora_training_client(name, RANK, each).result(CALL_S) for each in range(args.training)]
    samplers = [each.save_weights_and_get_sampling_client().result(CALL_S) for each in trainings]
    shared = Clients(trainings, samplers, [0] * args.training)
    work = [(shared.train, each) for each in range(args.training)]
    work += [(shared.sample, each) for each in range(args.sampling)]
    threads = [threading.Thread(target=shared.run, args=each) for each in work]
    memory = [service.memory()]
    began = time.monotonic()
    for each in threads:
        each.start()
    kills = _kill(service, args.kills, shared, memory) if args.kills else _watch(service, args.seconds, memory)
    shared.ended.set()
    for each in threads:
        each.join(CALL_S)
    seconds = time.monotonic() - began
    distances = []
    for number, training in enumerate(trainings):
        alone = client.create_lora_training_client(name, RANK, number).result(CALL_S)
        for step in range(shared.counts[number]):
            step_of(alone, number, step)
        distances.append(distance(saved_tensors(service, training), saved_tensors(service, alone)))
    hangs = [each.name for each in threads if each.is_alive()]
    return {
        "seconds": seconds,
        "clients": {"sampling": args.sampling, "training": args.training},
        "kills": kills,
        "samples": _latencies(shared.samples, began),
        "steps": _latencies(shared.steps, began),
        "memory_bytes": memory,
        "failures": shared.failures + hangs,
        "steps_of_each": shared.counts,
        "distance": max(distances, default=0.0),
        "verified": max(distances, default=0.0) <= (CLOSE_ENOUGH if args.join else 0.0),
        "met": not shared.failures and not hangs,
    }


def _watch(service: Service, seconds: float, memory: list[int]) -> dict[str, int]:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(5.0, left))
        memory.append(service.memory())
    return {}


def _kill(service: Service, kills: int, shared: Clients, memory: list[int]) -> dict[str, int]:
    draws, done = random.Random(0), {"service": 0, "trainer rank": 0, "replica": 0}
    for number in range(kills):
        steps = len(shared.steps)
        until = time.monotonic() + CALL_S  # every life must get something done
        while len(shared.steps) == steps and time.monotonic() < until and not shared.failures:
            time.sleep(0.05)
        time.sleep(draws.uniform(0.0, 3.0))
        what = draws.choice(sorted(done))
        say(f"kill {number + 1} of {kills}: {what} ({len(shared.steps)} steps, {len(shared.samples)} samples)")
        service.kill(what)
        done[what] += 1
        memory.append(service.memory())
    return done


def _latencies(seen: list[tuple[float, float]], began: float) -> dict[str, float]:
    """Milliseconds, and the longest time in seconds in which none ended."""
    if len(seen) < 2:
        return {"count": len(seen)}
    cuts = statistics.quantiles((seconds for _, seconds in seen), n=100)
    ends = [began, *sorted(end for end, _ in seen)]
    gap = max(later - earlier for earlier, later in itertools.pairwise(ends))
    return {"count": len(seen), **{f"p{at}_ms": cuts[at - 1] * 1e3 for at in (50, 95, 99)}, "longest_gap_s": gap}


def text(report: Report) -> str:
    """The report as a table, and lines below it."""
    clients, memory, rows = report["clients"], [each / 1e6 for each in report["memory_bytes"]], []
    for what in ("samples", "steps"):
        found = report[what]
        if "p50_ms" in found:
            times = [f"{found[f'p{at}_ms']:.0f}" for at in (50, 95, 99)]
            rows.append([what, f"{found['count'] / report['seconds']:.1f}", *times, f"{found['longest_gap_s']:.1f}"])
    killed = "".join(f", {count} x {what} killed" for what, count in report["kills"].items())
    third, taken = max(1, len(memory) // 3), report["steps_of_each"]
    first, last = max(memory[:third]), max(memory[-third:])
    lines = [
        f"{clients['sampling']} clients sampled and {clients['training']} trained for {report['seconds']:.0f} s{killed}",
        f"private memory: at most {first:.0f} MB in the first third, {last:.0f} MB in the last",
        (
            f"after {min(taken, default=0)} to {max(taken, default=0)} steps each, the weights of all clients differ by at most"
            f" {report['distance']:.1e} of their norm from those of a client alone"
        ),
        *(f"failed: {each}" for each in report["failures"]),
    ]
    return table(("", "a second", "p50, ms", "p95, ms", "p99, ms", "longest gap, s"), rows) + "\n".join(lines) + "\n"


def main() -> NoReturn:
    """Start a service, load it, and end the program with the exit code."""
    parser = options_of(__doc__)
    parser.add_argument("--model", type=Path, default=Path("runs/arithmetic/task-0/model"))
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--sampling", type=int, default=64, help="clients that sample")
    parser.add_argument("--training", type=int, default=8, help="clients that train")
    parser.add_argument("--seconds", type=float, default=300.0, help="of load, without --kills")
    parser.add_argument("--kills", type=int, default=0, help="kill that many processes, one after the other, instead")
    parser.add_argument("--join", action="store_true", help="compute requests of several clients together")
    args = parser.parse_args()
    sys.path.append(str(Path(sys.prefix) / "tinker"))  # where `make setup` puts the SDK
    os.environ["TINKER_TELEMETRY"] = "0"

    def measured() -> Report:
        if not (args.model / "config.json").is_file():
            raise ConfigError(f"{args.model} is no model.", part="benchmark", hint="`make demo` makes one.")
        with tempfile.TemporaryDirectory(prefix="weightlane-service-") as directory:
            service = Service(args.model, Path(directory), args.port, join_clients=args.join)
            try:
                service.start()
                return load(service, args)
            finally:
                service.stop()

    code = 143  # of a signal
    try:
        code = finish("service-load", measured, text, args.json)
    finally:
        sys.stdout.flush()
        os._exit(code)  # the SDK's threads would go on calling


if __name__ == "__main__":
    main()
