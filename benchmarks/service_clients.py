"""Measures what several clients of `weightlane tinker` get done together, beside one after the other.

    make demo                                       # makes the model
    python -m benchmarks.service_clients            # clients that train
    python -m benchmarks.service_clients --samples 8    # and sample from their newest weights before each step

Each client is a process that trains an adapter of its own by the public Tinker SDK. In each round, every client takes --steps
steps alone, one client after the other; then all of them take as many at once. Reported is the ratio of both times. At the end,
each client's weights are compared with those that a further client gets by the same steps alone: the service computes passes of
several clients together, which may round sums in another order. The SDK must be installed (``make setup`` does).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import WeightlaneError
from weightlane.cli.bench.report.machine import this_machine

from .command import Report, options_of
from .service import CALL_S, Service, tensors_at, with_service
from .service_overhead import RANK, rows, served_step

CLOSE_ENOUGH = 1e-4
"""Largest distance of a client's weights, as a part of their norm: what rounding may add up to over all steps."""


class Client:
    """A client in a process of its own."""

    def __init__(self, service: Service, model: Path, number: int, batch: int, samples: int) -> None:
        command = [sys.executable, "-m", "benchmarks.service_clients", "client", service.url, str(model)]
        self._process = subprocess.Popen(  # noqa: S603 - this module
            [*command, str(number), str(batch), str(samples)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._service, self.number = service, number
        self.end()

    def begin(self, steps: int) -> None:
        """Let it take some steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()

    def end(self) -> str:
        """Wait until it has taken them; where its weights are saved if it took none."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise WeightlaneError(
                f"client {self.number} has died.", part="benchmark", hint="See what it printed above."
            )
        return answer

    def weights(self) -> dict[str, torch.Tensor]:
        """Its adapter, by PEFT's names."""
        self.begin(0)
        return tensors_at(self._service, self.end())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(60)


def work(url: str, model: str, number: int, batch: int, samples: int) -> None:
    """The process of a client: takes as many steps as each line of its input says, or saves its weights for a 0."""
    import tinker
    from tinker import types

    client = tinker.ServiceClient(base_url=url, api_key="tml-any")
    training, taken = client.create_lora_training_client(model, RANK, number).result(CALL_S), 0
    print("ready", flush=True)
    params = types.SamplingParams(max_tokens=8, temperature=1.0)
    for line in sys.stdin:
        for _ in range(int(line)):
            if samples:
                sampler = training.save_weights_and_get_sampling_client().result(CALL_S)
                prompt = types.ModelInput.from_ints([3 + taken % 10, 4, 5])
                sampler.sample(prompt, samples, params).result(CALL_S)
            served_step(training, rows(1000 * number + taken, batch))
            taken += 1
        answer = "taken" if int(line) else training.save_state("compared", overwrite=True).result(CALL_S).path
        print(answer, flush=True)


def measure(service: Service, args: Any) -> Report:
    """Take turns, and all at once."""
    model, seconds = args.model.resolve(), {"alone": list[float](), "together": list[float]()}
    clients = [Client(service, model, number, args.batch, args.samples) for number in range(args.clients)]
    try:
        for turn in range(args.rounds + 1):  # the first one does not count
            began = time.perf_counter()
            for each in clients:
                each.begin(args.steps)
                each.end()
            between = time.perf_counter()
            for each in clients:
                each.begin(args.steps)
            for each in clients:
                each.end()
            ended = time.perf_counter()
            if turn:
                seconds["alone"].append(between - began)
                seconds["together"].append(ended - between)
        distances = []
        for number in range(args.clients):
            clients.append(Client(service, model, number, args.batch, 0))
            clients[-1].begin(2 * args.steps * (args.rounds + 1))
            clients[-1].end()
            distances.append(_distance(clients[number].weights(), clients[-1].weights()))
    finally:
        for each in clients:
            each.close()
    ratios = [one / other for one, other in zip(seconds["alone"], seconds["together"], strict=True)]
    return {
        "machine": this_machine(),
        "clients": args.clients,
        "batch": args.batch,
        "samples": args.samples,
        "steps": args.steps,
        "seconds": seconds,
        "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "distance": max(distances),
        "verified": max(distances) <= CLOSE_ENOUGH,
    }


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of all differences, as a part of that of all tensors."""
    difference = sum(float((one[name].double() - other[name].double()).square().sum()) for name in other)
    return float((difference / sum(float(each.double().square().sum()) for each in other.values())) ** 0.5)


def text(report: Report) -> str:
    """The report as lines."""
    each = {name: statistics.median(found) for name, found in report["seconds"].items()}
    ratio, taken = report["ratio"], report["clients"] * report["steps"]
    sampled = f"{report['samples']} samples and " if report["samples"] else ""
    return (
        f"{report['clients']} clients, {sampled}{report['batch']} sequences a step: {taken / each['alone']:.1f} steps a second"
        f" one after the other, {taken / each['together']:.1f} together: {ratio['median']:.2f} times"
        f" ({ratio['least']:.2f} to {ratio['most']:.2f})\n"
        f"their weights differ by {report['distance']:.1e} of their norm from those of clients alone"
    )


def main() -> None:
    """Measure."""
    if sys.argv[1:2] == ["client"]:
        url, model, *numbers = sys.argv[2:]
        sys.path.append(str(Path(sys.prefix) / "tinker"))
        os.environ["TINKER_TELEMETRY"] = "0"
        try:
            work(url, model, *map(int, numbers))
        except Exception:  # noqa: BLE001 - its parent sees that it has ended
            traceback.print_exc()
        os._exit(0)  # the SDK's threads would go on calling
    parser = options_of(__doc__, rounds=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--samples", type=int, default=0, help="completions that a client asks for before each step")
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    with_service("service_clients", parser, measure, text)


if __name__ == "__main__":
    main()
