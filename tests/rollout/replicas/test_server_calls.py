"""`ServerReplica` names the fault in every answer that does not come from a willing vLLM server, whoever listens there."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from waiting import HANG_S

from weightlane.ckpt_engines import (
    CommitError,
    ConfigError,
    DeadlineExceededError,
    ProtocolError,
    QuarantinedError,
    UntouchedError,
    WeightlaneError,
    WorkerDiedError,
)
from weightlane.rollout import ServerReplica

ADDRESS = {"host": "127.0.0.1", "port": 1, "secret": "s"}


class Answering(ThreadingHTTPServer):
    """Answers every call with what the test says, and notes what came."""

    daemon_threads = True

    def __init__(self) -> None:
        self.status, self.body = 200, b"{}"
        self.bodies: dict[str, bytes] = {}
        """Bodies of certain paths, in the place of `body`."""
        self.silent = self.hangs_up = ""
        """Beginning of the paths of which calls are not answered, and whose connections break."""
        self.seen: list[tuple[str, str | None]] = []
        self.released = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers["Authorization"]))
        if self.server.silent and self.path.startswith(self.server.silent):
            self.server.released.wait(HANG_S)
            return
        if self.server.hangs_up and self.path.startswith(self.server.hangs_up):
            return
        self.send_response(self.server.status)
        body = self.server.bodies.get(self.path, self.server.body)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - the name that http.server looks for

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def answering() -> Iterator[Answering]:
    server = Answering()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def refusal(url: str, **settings: Any) -> WeightlaneError:
    with pytest.raises(WeightlaneError) as raised:
        asyncio.run(asyncio.wait_for(ServerReplica(url, **settings).connect(ADDRESS, "shm"), HANG_S))
    return raised.value


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (404, b'{"detail":"Not Found"}', ConfigError, "VLLM_SERVER_DEV_MODE=1"),
        (401, b"{}", ConfigError, "Check the token"),
        (200, b"<html>hello</html>", ProtocolError, "not a vLLM server"),
        (500, b'{"error":{"message":"out of paper"}}', WeightlaneError, "out of paper"),
        (500, b"\xff\xfe", WeightlaneError, "GET /get_world_size was answered with status 500"),
        (500, b'{"error":{"message":"Weight transfer not configured."}}', ConfigError, "--weight-transfer-config"),
        (500, b'{"error":{"message":"Invalid init_info for NCCL"}}', ConfigError, "with another weight-transfer"),
    ],
)
def test_an_answer_that_is_not_the_one_wanted_is_a_typed_error_that_says_what_to_do(
    answering: Answering, status: int, body: bytes, kind: type[WeightlaneError], says: str
) -> None:
    answering.status, answering.body = status, body
    error = refusal(answering.url)
    assert type(error) is kind
    assert says in str(error)
    assert error.peer == answering.url


def test_a_data_parallel_server_is_refused_whatever_the_number_of_ranks(answering: Answering) -> None:
    """Two engines of one rank each are not one engine of two ranks, for which the script would wait."""
    answering.bodies = {
        "/get_world_size": b'{"world_size": 2}',
        "/get_world_size?include_dp=false": b'{"world_size": 1}',
    }
    for ranks in (1, 2):
        error = refusal(answering.url, tensor_parallel=ranks)
        assert isinstance(error, ConfigError)
        assert "data-parallel: it has 2 ranks in engines of 1." in str(error)


def test_a_rank_s_own_error_comes_through_with_its_type_and_hint(answering: Answering) -> None:
    inner = {"type": "StagingMemoryError", "message": "no room.", "part": "rollout rank 1", "peer": ""}
    inner["hint"] = "Get more."
    said = f"Call failed: [weightlane-error:{json.dumps({'error': inner, 'intact': True})}]', see above"
    answering.status, answering.body = 500, json.dumps({"error": {"message": said}}).encode()
    error = refusal(answering.url)
    assert (type(error).__name__, error.part, error.hint) == ("StagingMemoryError", "rollout rank 1", "Get more.")


def test_the_token_goes_with_every_call_and_only_there(answering: Answering) -> None:
    answering.body = b'{"world_size": 1}'
    replica = ServerReplica(answering.url, token="sesame")
    asyncio.run(replica.connect(ADDRESS, "shm"))
    assert [path for path, _ in answering.seen] == [
        "/get_world_size?include_dp=false",
        "/get_world_size",
        "/init_weight_transfer_engine",
    ]
    assert {sent for _, sent in answering.seen} == {"Bearer sesame"}
    error = refusal(f"{answering.url}/x", token="sesame", tensor_parallel=3)
    assert isinstance(error, ConfigError)
    assert "the server has 1 ranks, and tensor_parallel says 3" in str(error)
    assert "sesame" not in repr(vars(error))
    error = refusal(answering.url, token="sesame\n")
    assert isinstance(error, ConfigError)
    assert "the token has a line break" in str(error)


def test_a_commit_is_one_call_and_a_second_one_stops_a_server_whose_weights_are_in_doubt(answering: Answering) -> None:
    replica = ServerReplica(answering.url)
    asyncio.run(replica.commit(7))
    stop = "/pause?mode=abort&clear_cache=true"
    inner = CommitError("not staged.").to_wire()
    answering.status = 500
    for intact in (True, False):
        answering.body = f"failed [weightlane-error:{json.dumps({'error': inner, 'intact': intact})}]".encode()
        with pytest.raises(UntouchedError if intact else QuarantinedError, match="not staged"):
            asyncio.run(replica.commit(8))
        assert replica.serving is intact
    assert [path for path, _ in answering.seen] == ["/update_weights"] * 3 + [stop]
    answering.status, answering.body = 200, b"{}"

    async def quarantined_during_a_commit() -> None:
        await replica.commit(7)
        await asyncio.gather(replica.commit(8), replica.quarantine(CommitError("no quorum.")))
        assert not replica.serving
        await replica.rollback(8)
        assert (replica.serving, replica.version) == (True, 7)

    asyncio.run(quarantined_during_a_commit())
    assert [path for path, _ in answering.seen[4:]] == ["/update_weights"] * 2 + [stop, "/update_weights"]
    for how, limit_s, cause in (("silent", 0.2, "DeadlineExceeded"), ("hangs_up", HANG_S, "WorkerDied")):
        answering.seen.clear()
        setattr(answering, how, "/update_weights")
        with pytest.raises(QuarantinedError, match=rf"cannot be trusted.*{cause}.*update_weights"):
            asyncio.run(ServerReplica(answering.url, commit_timeout_s=limit_s).commit(8))
        assert [path for path, _ in answering.seen] == ["/update_weights", stop]
        setattr(answering, how, "")


def test_a_server_that_does_not_answer_ends_the_wait_at_its_deadline_and_none_is_named_at_once(
    answering: Answering, free_port: int
) -> None:
    answering.silent = "/"
    assert isinstance(refusal(answering.url, connect_timeout_s=0.2), DeadlineExceededError)
    error = refusal(f"http://127.0.0.1:{free_port}")
    assert isinstance(error, WorkerDiedError)
    assert str(free_port) in str(error)


def test_addresses_are_checked_and_name_replicas_and_ranks() -> None:
    one, two = ServerReplica("http://10.0.0.1:8000/"), ServerReplica("https://[::1]:8001", tensor_parallel=2)
    assert (one.name, one.url) == ("10.0.0.1-8000", "http://10.0.0.1:8000")
    assert two.subscriber_names() == ["1-8001/0", "1-8001/1"]
    for url in ("127.0.0.1:8000", "ftp://host", "http://", "http://u:p@host", "http://host:port"):
        with pytest.raises(ConfigError, match="is not the address of a server"):
            ServerReplica(url)
