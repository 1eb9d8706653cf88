"""The public SDK trains through the service: numbers are those of plain torch in float64, also across kills.

Models are adapters or all weights. `test_sampling` samples from them.
"""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import random
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from both_paths import algorithm_of, reinforced_steps, state_tensors, supervised_steps, trained_by_jobs
from float64_reference import VOCAB, Float64Model
from service_process import SDK, TOKENS, ServiceProcess
from tiny_models import load_tensors
from training_clients import ADAM, data, differing, saved, step
from waiting import HANG_S

pytestmark = pytest.mark.skipif(not SDK.is_dir(), reason="the tinker SDK is not installed: make setup installs it")

CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
"""The clips of `weightlane train`, as the API names them."""
BODY_BYTES = 1 << 20
"""The largest body that the service takes."""
RARE = pytest.mark.exhaustive

Services = Callable[..., Iterator[ServiceProcess]]


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Services:
    def running(**settings: Any) -> Iterator[ServiceProcess]:
        with ServiceProcess(model, tmp_path_factory.mktemp("service") / "files", save_every=2, **settings) as service:
            yield service

    return running


@pytest.fixture(scope="module")
def service(running: Services) -> Iterator[ServiceProcess]:
    yield from running(max_loaded=3, max_body_bytes=BODY_BYTES)


@pytest.fixture(scope="module")
def separate(running: Services) -> Iterator[ServiceProcess]:
    """A service that computes each client's requests by themselves."""
    yield from running(max_loaded=2, join_clients=False)


@pytest.fixture(scope="module")
def all_weights(running: Services) -> Iterator[ServiceProcess]:
    """A service whose models are all weights, which take turns on the rank."""
    yield from running(trains="all_weights")


def test_log_probabilities_and_steps_are_those_of_float64(service: ServiceProcess, model: Path) -> None:
    """The first step is not clipped, so that the size of its gradient counts; another model resumes from there."""
    client = service.client()
    begun = client.create_lora_training_client("tiny", 4, 7).result(HANG_S)
    assert (begun.get_info().is_lora, begun.get_info().lora_rank) == (True, 4)
    before = saved(service, begun, "begun")
    step(begun, 1, grad_clip_norm=0.0)
    state = begun.save_state("one").result(HANG_S).path
    training = client.create_training_client_from_state_with_optimizer(state).result(HANG_S)
    looked = training.forward(data(2), "cross_entropy").result(HANG_S)
    passed, _ = step(training, 2)
    step(training, 3)
    after = saved(service, training, "three")

    exact = Float64Model(model, before, 4, ADAM)
    exact.step(1, math.inf)
    logprobs, loss = exact.step(2, ADAM["grad_clip_norm"])
    exact.step(3, ADAM["grad_clip_norm"])
    for answer in (looked, passed.result(HANG_S)):
        assert answer.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
        found = torch.cat([each["logprobs"].to_torch() for each in answer.loss_fn_outputs])
        assert (found.double() - logprobs).abs().max() < 1e-5
    moved = {name: each.detach() - before[name] for name, each in exact.trained.items()}
    off = {name: each.detach() - after[name] for name, each in exact.trained.items()}
    assert all(bool(each.any()) for each in moved.values())
    moved_norm, off_norm = (torch.cat([each.flatten() for each in all_of.values()]).norm() for all_of in (moved, off))
    assert moved_norm > 0.1
    assert off_norm / moved_norm < 1e-5


@pytest.mark.exhaustive
def test_the_example_a_run_and_a_worker_take_the_same_steps_bit_for_bit(
    all_weights: ServiceProcess, model: Path, tmp_path: Path
) -> None:
    """Weights and the optimizer's state; but for rounding where a prompt has targets, which only the service computes."""
    before = load_tensors(model)
    for number, (prompt, far, objective, loss) in enumerate(
        (
            ([7], 0.1, "dual_clip", ("importance_sampling",)),  # as in the examples: of so new samples, none is clipped
            ([7], 0.6, "grpo", ("ppo", CLIPS)),
            ([7], 0.6, "cispo", ("cispo", CLIPS)),
            ([7], 0.0, "supervised", ()),
            ([5, 17, 200], 0.1, "dual_clip", ("importance_sampling",)),
        )
    ):
        training = all_weights.client().create_lora_training_client("tiny", 4).result(HANG_S)
        assert (training.get_info().is_lora, training.get_info().lora_rank) == (False, None)
        algorithm = algorithm_of("grpo" if objective == "supervised" else objective)
        if objective == "supervised":
            jobs = supervised_steps(training, prompt)
        else:
            jobs = reinforced_steps(training, prompt, far, algorithm, *loss)
        found, path = saved(all_weights, training, "example"), training.save_state("state").result(HANG_S).path
        expected, state = trained_by_jobs(model, jobs, algorithm, tmp_path / f"run-{number}", worker=False)
        for name in expected:
            assert f"exp_avg|{name}|{','.join('0' * expected[name].dim())}" in state
        by_worker, its_state = trained_by_jobs(model, jobs, algorithm, tmp_path / f"worker-{number}", worker=True)
        assert not differing(by_worker, expected), objective
        assert not differing(its_state, state), objective
        if len(prompt) == 1:
            assert not differing(found, expected), objective
            assert not differing(state_tensors(all_weights.checkpoint(path)), state), objective
        both = [torch.cat([(each[name] - expected[name]).flatten() for name in expected]) for each in (before, found)]
        assert both[1].norm() < 1e-4 * both[0].norm()


@pytest.mark.parametrize("kind", ["service", *(pytest.param(each, marks=RARE) for each in ("separate", "all_weights"))])
def test_clients_that_train_together_end_as_alone_also_when_the_service_is_killed(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Bit for bit where their requests are computed separately, and but for rounding where they are joined.

    Parked models and models of all weights take turns on the rank.
    """
    service: ServiceProcess = request.getfixturevalue(kind)
    settings = {"alice": (2, 1e-2), "bob": (4, 3e-3)}
    if kind != "all_weights":  # which take turns already as two
        settings["alice's other"] = (8, 1e-3)
    steps = 3

    def create(who: str) -> Any:
        client = service.client(who.partition("'")[0])
        return client.create_lora_training_client("tiny", settings[who][0], 3).result(HANG_S)

    def take(who: str, training: Any, number: int) -> tuple[Any, Any]:
        rank, rate = settings[who]
        return step(training, 100 * rank + number, rate)

    expected = {}
    for who in settings:
        alone = create(who)
        for number in range(steps):
            take(who, alone, number)[1].result(HANG_S)
        expected[who] = saved(service, alone, "alone")
    trainings = {who: create(who) for who in settings}
    order = [who for who in settings for _ in range(steps)]
    random.Random(0).shuffle(order)
    turns = {who: iter(range(steps)) for who in settings}
    pending = []
    for position, who in enumerate(order):
        pending.append(take(who, trainings[who], next(turns[who])))
        if kind != "service" and position == len(order) // 2:
            pending[-1][0].result(HANG_S)  # so that the kill comes between the pass and the step, or soon after it
            service.kill()
            service.start()
    for _, stepped in pending:
        stepped.result(HANG_S)
    for who, training in trainings.items():
        found = saved(service, training, "together")
        assert kind == "service" or not differing(found, expected[who])
        difference = sum(float((found[name].double() - expected[who][name].double()).square().sum()) for name in found)
        norm = sum(float(each.double().square().sum()) for each in expected[who].values())
        assert (difference / norm) ** 0.5 <= 1e-6
    metrics = httpx.get(f"{service.url}/metrics", headers={"x-api-key": TOKENS["alice"]}).raise_for_status().text
    assert ('jobs_total{kind="joint"}' in metrics) == (kind == "service")
    assert all(bool(each.any()) for found in expected.values() for each in found.values()), "all were trained"


@pytest.mark.filterwarnings("ignore:DEPRECATED")  # load_state, which older programs call
def test_checkpoints_of_all_weights_resume_bit_for_bit_and_one_that_is_damaged_changes_nothing(
    all_weights: ServiceProcess,
) -> None:
    alice = all_weights.client("alice")

    alone = alice.create_lora_training_client("tiny", 4).result(HANG_S)
    step(alone, 10)
    half = alone.save_state("half").result(HANG_S).path
    step(alone, 12)
    expected = saved(all_weights, alone, "alone")

    resumed = alice.create_training_client_from_state_with_optimizer(half).result(HANG_S)
    step(resumed, 12)
    assert not differing(saved(all_weights, resumed, "resumed"), expected)
    resumed.forward_backward(data(7), "cross_entropy").result(HANG_S)
    broken = resumed.save_state("broken").result(HANG_S).path
    largest = max(all_weights.checkpoint(broken).iterdir(), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(Exception, match="is missing or cut off"):
        resumed.load_state_with_optimizer(broken).result(HANG_S)
    with pytest.raises(Exception, match="other weights were loaded, or should have been"):
        step(resumed, 8)[1].result(HANG_S)
    assert not differing(saved(all_weights, resumed, "unchanged"), expected)
    resumed.load_state_with_optimizer(half).result(HANG_S)
    step(resumed, 12)
    assert not differing(saved(all_weights, resumed, "loaded"), expected)
    without_optimizer = alice.create_training_client_from_state(half).result(HANG_S)
    step(without_optimizer, 12)
    assert differing(saved(all_weights, without_optimizer, "anew"), expected), "moments were to be dropped"


def test_a_mistake_is_said_and_touches_nothing_else(service: ServiceProcess) -> None:
    import tinker
    from tinker import types

    client, other = service.client("alice"), service.client("bob")
    training = client.create_lora_training_client("tiny", 4, 5).result(HANG_S)
    step(training, 0)[1].result(HANG_S)
    before = saved(service, training, "before")
    unknown = types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [VOCAB]})
    long = types.Datum(types.ModelInput.from_ints([1] * 65), {"target_tokens": [1] * 65})
    for wrong, loss, said in (
        (data(2, 1), "nope", "nope"),
        ([unknown], "cross_entropy", "target"),
        ([long], "cross_entropy", "65 tokens"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=said):
            training.forward_backward(wrong, loss).result(HANG_S)
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        training.optim_step(types.AdamParams()).result(HANG_S)
    for refused in (
        lambda: client.create_lora_training_client("tiny", 9).result(HANG_S),
        lambda: client.create_lora_training_client("other", 4).result(HANG_S),
        lambda: other.create_training_client_from_state(training.save_state("mine").result(HANG_S).path).result(HANG_S),
    ):
        with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError)):
            refused()
    assert not differing(saved(service, training, "after"), before)
    step(training, 1)[1].result(HANG_S)
    assert differing(saved(service, training, "later"), before)


def test_what_failed_before_a_kill_changes_nothing_after_it(separate: ServiceProcess) -> None:
    import tinker
    from tinker import types

    service, client = separate, separate.client()
    before, after = (client.create_lora_training_client("tiny", 4, 9).result(HANG_S) for _ in range(2))
    for training in (before, after):
        step(training, 0)[1].result(HANG_S)

    def fails(future: Any) -> None:
        with pytest.raises(tinker.RequestFailedError):
            future.result(HANG_S)

    outside = types.Datum(types.ModelInput.from_ints([VOCAB]), {"target_tokens": [1]})
    for training in (before, after):  # a part of a mini-batch that fails as a whole
        training.forward_backward(data(1), "cross_entropy").result(HANG_S)
        fails(training.forward_backward([outside], "cross_entropy"))
    fails(before.optim_step(types.AdamParams()))
    service.kill()
    service.start()
    fails(after.optim_step(types.AdamParams()))
    alone = client.create_lora_training_client("tiny", 4, 9).result(HANG_S)
    for number in (0, 2):
        step(alone, number)[1].result(HANG_S)
    expected = saved(service, alone, "alone")
    for training in (before, after):
        step(training, 2)[1].result(HANG_S)
        assert not differing(saved(service, training, "failed"), expected)


def test_a_refused_request_has_its_number_and_the_next_is_taken(service: ServiceProcess, monkeypatch: Any) -> None:
    from tinker import types
    from tinker.resources.weights import AsyncWeightsResource, UntypedAPIFuture

    async def sharpen(self: Any, *, request: Any, max_retries: int) -> Any:
        return await self._post("/api/v1/sharpen", body=request.model_dump(), cast_to=UntypedAPIFuture)

    training = service.client("alice").create_lora_training_client("tiny", 4, 2).result(HANG_S)
    with pytest.raises(Exception, match="encryption of files by age is not offered"):
        training.save_weights_external("one", age_encryption_recipients=["age1"]).result(HANG_S)
    monkeypatch.setattr(AsyncWeightsResource, "save_external", sharpen)
    with pytest.raises(Exception, match="sharpen is not offered"):
        training.save_weights_external("one").result(HANG_S)
    incompressible = random.Random(0).choices(range(2**31), k=BODY_BYTES // 3)
    for tokens in ([1] * BODY_BYTES, incompressible):  # too large after decompression, and before it
        large = types.Datum(types.ModelInput.from_ints(tokens), {"target_tokens": tokens})
        with pytest.raises(Exception, match="max_body_bytes"):
            training.forward_backward([large], "cross_entropy").result(HANG_S)
        with pytest.raises(Exception, match="a part of the mini-batch has no gradient"):
            training.optim_step(types.AdamParams()).result(HANG_S)
        assert step(training, 0)[1].result(HANG_S) is not None


def test_strangers_garbage_and_large_bodies_are_turned_away_and_change_no_weight(service: ServiceProcess) -> None:
    from tinker.proto.request_conv import forward_backward_request_to_proto
    from tinker.types import ForwardBackwardInput, ForwardBackwardRequest

    training = service.client("alice").create_lora_training_client("tiny", 4, 2).result(HANG_S)
    step(training, 0)[1].result(HANG_S)
    before = saved(service, training, "before")
    owner = {"model_id": training.model_id, "seq_id": 9}
    batch = ForwardBackwardRequest(forward_backward_input=ForwardBackwardInput(data(1), "cross_entropy"), **owner)
    good = {
        "forward_backward": forward_backward_request_to_proto(batch).SerializeToString(),
        "optim_step": json.dumps({**owner, "adam_params": {"learning_rate": 1.0}}).encode(),
        "save_weights": json.dumps({**owner, "path": "stolen"}).encode(),
        "unload_model": json.dumps(owner).encode(),
    }
    ours, other = {"X-API-Key": "tml-alice"}, {"X-API-Key": "tml-bob"}
    with httpx.Client(base_url=f"{service.url}/api/v1/", timeout=HANG_S) as web:
        for path, body in good.items():
            for token in ({}, {"X-API-Key": "tml-wrong"}, {"Authorization": "Bearer x"}):
                assert web.post(path, headers=token, content=body).status_code == 401
            answer = web.post(path, headers=other, content=body)  # whole, but not theirs
            assert (answer.status_code, "no model" in answer.text) == (404, True), answer.text
        assert web.post("forward_backward", headers=ours, content=b"x" * (2 * BODY_BYTES)).status_code == 413
        for path in (*good, "create_model", "asample", "retrieve_future", "nothing"):
            for garbage in (b"", b"{", b"[]", b'{"model_id": 3}', bytes(range(256))):  # `wire` fuzzes the parsers
                answer = web.post(path, headers=ours, content=garbage)
                assert 400 <= answer.status_code < 500, answer.text
        assert web.get("healthz").status_code == 200
        assert web.get("../../metrics", headers=ours).text.count("weightlane_service_") > 5
    assert not differing(saved(service, training, "after"), before)


@pytest.mark.parametrize("kind", ["service", "all_weights"])
def test_the_sdk_downloads_the_files_of_a_checkpoint_bit_for_bit_or_ends_with_an_error(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tinker import RestClient
    from tinker.cli.__main__ import main
    from tinker.lib.internal_client_holder import sessionless_holder_cache

    service: ServiceProcess = request.getfixturevalue(kind)
    training = service.client().create_lora_training_client("tiny", 4, 3).result(HANG_S)
    step(training, 0)[1].result(HANG_S)
    state = training.save_state("mine").result(HANG_S).path
    external = training.save_weights_external("mine").result(HANG_S).path
    folder = service.checkpoint(external)
    on_disk = {file.name: file.read_bytes() for file in folder.iterdir()}

    def downloaded(path: str, who: str = "alice") -> dict[str, bytes] | None:
        """The files that `tinker checkpoint download` leaves; None if it ends with an error."""
        monkeypatch.setattr(sessionless_holder_cache, "_holders", {})  # as in a process of its own
        monkeypatch.setenv("TINKER_BASE_URL", service.url)
        monkeypatch.setenv("TINKER_API_KEY", TOKENS[who])
        monkeypatch.setattr(sys, "argv", ["tinker", "checkpoint", "download", path, "--force", f"--output={tmp_path}"])
        with pytest.raises(SystemExit) as ended:
            main()
        place = tmp_path / path.removeprefix("tinker://").replace("/", "_")
        assert place.exists() == (not ended.value.code)
        return {file.name: file.read_bytes() for file in place.iterdir()} if place.exists() else None

    assert downloaded(external, "bob") is downloaded(state, "bob") is downloaded(f"{external}s") is None
    assert downloaded(external) == downloaded(state) == on_disk, "a state is exported for the download"
    rest, key = RestClient(), {"X-API-Key": TOKENS["alice"]}
    known = {each.tinker_path for each in rest.list_user_checkpoints().result(HANG_S).checkpoints}
    assert {each for each in known if training.model_id in each or each.endswith("/download")} == {state, external}
    urls = rest.get_external_weights_urls(external).result(HANG_S).urls
    assert {name: httpx.get(url).content for name, url in urls.items()} == on_disk
    with httpx.Client(base_url=f"{service.url}/api/v1/training_runs/{training.model_id}/", timeout=HANG_S) as web:
        for asked in ("checkpoints/external_weights/mine/external_weights_urls", "checkpoints/weights/mine/archive"):
            assert web.get(asked).status_code == 401
            assert web.get(asked, headers={"X-API-Key": TOKENS["bob"]}).status_code == 404
        packed = web.get("checkpoints/external_weights/mine/archive", headers=key).headers["Location"]
        with tarfile.open(fileobj=io.BytesIO(web.get(packed).content)) as archive:
            assert {each.name: archive.extractfile(each).read() for each in archive} == on_disk
        for url in (packed, *urls.values()):
            address, query = url.split("?")
            others = {f"{address.rpartition('/')[0]}/{each}?{query}" for each in ("x", "%2E%2E", "..%2Fmine", *urls)}
            wrong = (address, url.replace("expires=", "expires=9"), url[:-1] + "01"[url[-1] == "0"])
            assert {web.get(each).status_code for each in (*wrong, *(others - {url}))} == {404}

    largest, read = max(folder.iterdir(), key=lambda file: file.stat().st_size), http.client.HTTPResponse.read
    os.truncate(largest, 1 << 30)

    def interrupted(response: http.client.HTTPResponse, *size: int) -> bytes:
        if largest.name in response.headers["Content-Disposition"]:
            os.truncate(largest, 0)  # the service cannot read on
        return read(response, *size)

    monkeypatch.setattr(http.client.HTTPResponse, "read", interrupted)
    assert downloaded(external) is None
    assert "IncompleteRead" in capsys.readouterr().err
