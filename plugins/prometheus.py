"""An observer that serves metrics to Prometheus over HTTP, by default on loopback."""

from __future__ import annotations

import hmac
import http.server
import ipaddress
import logging
import os
import socket
import socketserver
import threading
from typing import Any

from .hooks import Facts, hookimpl

PROMETHEUS_ENV = "WEIGHTLANE_PROMETHEUS"
"""Environment variable with the address, ``PORT`` or ``HOST:PORT``. Port 0 chooses a free one, which is logged."""
PROMETHEUS_TOKEN_ENV = "WEIGHTLANE_PROMETHEUS_TOKEN"  # noqa: S105 - a name, not a token
"""Environment variable with the bearer token that clients must send; required unless the address is loopback."""

LOOPBACK = "127.0.0.1"
_REQUEST_TIMEOUT_S = 5.0
"""Longest time, in seconds, that a client may leave its connection silent."""
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Bounds of the histograms' buckets, in seconds."""

_log = logging.getLogger(__name__)


class PrometheusObserver:
    """Serves the events of the driver's hooks as metrics at ``http://<host>:<port>/metrics``.

    Args:
        port: TCP port; 0 chooses a free one: see `url`.
        host: Address to listen on.
        token: Token that clients must send as ``Authorization: Bearer <token>``; empty allows every client.

    Raises `ImportError` if prometheus_client is not installed (extra ``observability``), and `ValueError` if the address is not
    loopback and there is no token.
    """

    def __init__(self, port: int = 0, host: str = LOOPBACK, token: str = "") -> None:
        if not token and not is_loopback(host):
            raise ValueError(f"{host} is not loopback: set {PROMETHEUS_TOKEN_ENV} to a token that clients must send")
        self._address = (host, port)
        self._token = token
        self._metrics = _Metrics()
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._closed = False

    @property
    def url(self) -> str:
        """The URL of the metrics; empty before `start` and after `close`."""
        server = self._server
        return f"http://{_bracketed(self._address[0])}:{server.server_address[1]}/metrics" if server else ""

    def start(self) -> str:
        """Start to serve and return the URL. The first event also does. Raises `OSError`, for example if the port is in use."""
        with self._lock:
            if self._server is None and not self._closed:
                self._server = _Server(self._address, _handler(self._metrics, self._token))
                self._server.start()
                _log.info("Prometheus metrics: %s", self.url)
            return self.url

    def close(self) -> None:
        """Stop serving. Idempotent."""
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
        if server is not None:
            server.stop()

    @hookimpl
    def run_started(self, facts: Facts) -> None:
        """Set the step at which the run starts."""
        self.start()
        self._metrics.step.set(facts.get("step", 0))

    @hookimpl
    def training_step(self, step: int, facts: Facts) -> None:
        """Update the metrics of optimizer steps."""
        self.start()
        metrics = self._metrics
        metrics.step.set(step)
        metrics.step_seconds.observe(facts.get("seconds", 0.0))
        metrics.trained_tokens.inc(facts.get("tokens", 0))
        metrics.waited.inc(facts.get("waited_for_rollouts_s", 0.0))
        for gauge, key in metrics.gauges.items():
            if key in facts:
                gauge.set(facts[key])
        if "trainer_blocked_s" in facts:
            metrics.trainer_blocked.observe(facts["trainer_blocked_s"])

    @hookimpl
    def evaluated(self, facts: Facts) -> None:
        """Set the accuracy."""
        self.start()
        if "accuracy" in facts:  # supervised fine-tuning measures something else
            self._metrics.accuracy.set(facts["accuracy"])

    @hookimpl
    def version_opened(self) -> None:
        """Start to serve, at the latest with the first version."""
        self.start()

    @hookimpl
    def version_committed(self, version: int, facts: Facts) -> None:
        """Count the version, its times and its bytes."""
        self.start()
        metrics = self._metrics
        metrics.committed.inc()
        metrics.version.set(version)
        metrics.latency.observe(facts.get("latency_s", 0.0))
        metrics.sent_bytes.inc(facts.get("sent_bytes", 0))
        for name, replica in facts.get("replicas", {}).items():
            metrics.rollout_blocked.labels(name).observe(replica.get("blocked_s", 0.0))
            metrics.staged_bytes.labels(name).inc(replica.get("nbytes", 0))

    @hookimpl
    def version_aborted(self) -> None:
        """Count the aborted version."""
        self.start()
        self._metrics.aborted.inc()

    @hookimpl
    def replica_quarantined(self, replica: str) -> None:
        """Count the quarantine."""
        self.start()
        self._metrics.quarantined.labels(replica).inc()


class _Metrics:
    """All metrics, in a registry of their own, because a process may have another endpoint, as vLLM's does."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # noqa: PLC0415 - optional

        registry = CollectorRegistry()
        self.registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"weightlane_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"weightlane_{name}", text, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"weightlane_{name}", text, labels, registry=registry, buckets=_SECONDS)

        self.committed = counter("versions_committed", "Weight versions that were committed.")
        self.aborted = counter("versions_aborted", "Weight versions that were aborted.")
        self.quarantined = counter("replica_quarantines", "Times a replica was taken out of service.", "replica")
        self.version = gauge("serving_version", "The newest weight version in service.")
        self.latency = histogram("sync_latency_seconds", "From the start of a sync until the last replica served it.")
        self.rollout_blocked = histogram(
            "rollout_blocked_seconds", "Time in which a commit kept a replica from decoding.", "replica"
        )
        self.trainer_blocked = histogram(
            "trainer_blocked_seconds", "Time in which a publication blocked the trainer: publish plus fence."
        )
        self.sent_bytes = counter("sent_bytes", "Bytes that trainer ranks sent.")
        self.staged_bytes = counter("staged_bytes", "Bytes that a replica staged, over all its ranks.", "replica")
        self.step = gauge("training_step", "Optimizer steps taken.")
        self.step_seconds = histogram("training_step_seconds", "Time of forward, backward, fence and optimizer.")
        self.trained_tokens = counter("trained_tokens", "Generated tokens that the trainer used.")
        self.waited = counter("waited_for_rollouts_seconds", "Time in which the trainer waited for groups.")
        self.accuracy = gauge("heldout_accuracy", "Mean reward of greedy answers to held-out tasks.")
        self.gauges = {
            gauge("reward", "Mean reward of the last batch."): "reward",
            gauge("staleness_mean_versions", "Mean staleness of the last batch's tokens."): "staleness_mean",
            gauge("staleness_max_versions", "Largest staleness of the last batch's tokens."): "staleness_max",
            gauge("generated_tokens_per_second", "Tokens all replicas generate, mean since the start."): "tokens_per_s",
            gauge("overlap_ratio", "Share of time in which training and generation overlap."): "overlap_share",
        }


class _Server(http.server.ThreadingHTTPServer):
    """The HTTP server. Each request has a thread of its own, which a timeout ends."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.1,), name="weightlane-prometheus", daemon=True
        )

    def start(self) -> None:
        """Serve on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and free the port."""
        self.shutdown()
        self.server_close()
        self._thread.join(_REQUEST_TIMEOUT_S)

    def server_bind(self) -> None:
        """Bind the socket without looking up the host's name, which the base class does and which may be slow."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the library's signature
        """Log a failed request, such as one whose client disconnected, for debugging only."""
        _log.debug("a request of %s failed", client_address, exc_info=True)


def _handler(metrics: _Metrics, token: str) -> type[http.server.BaseHTTPRequestHandler]:
    """Return the library's handler of requests, which logs nothing, for clients that send `token`; if it is empty, for all."""
    from prometheus_client import MetricsHandler  # noqa: PLC0415 - optional

    class Handler(MetricsHandler):
        timeout = _REQUEST_TIMEOUT_S
        registry = metrics.registry

        def do_GET(self) -> None:  # noqa: N802 - the library's name
            scheme, _, given = self.headers.get("Authorization", "").partition(" ")
            right = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())
            if right or not token:
                super().do_GET()
                return
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def prometheus_from_environment(address: str) -> PrometheusObserver:
    """Make the observer for a value of `PROMETHEUS_ENV`."""
    host, _, port = address.rpartition(":")
    return PrometheusObserver(int(port), host.strip("[]") or LOOPBACK, os.environ.get(PROMETHEUS_TOKEN_ENV, ""))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
