"""The Prometheus endpoint: right figures, only for those who may have them, and gone when it is closed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from scraping import get, scrape

from weightlane.plugins import make_hooks
from weightlane.plugins.prometheus import PrometheusObserver, is_loopback, prometheus_from_environment


@pytest.fixture
def observer() -> Iterator[PrometheusObserver]:
    made = PrometheusObserver()
    yield made
    made.close()


def test_what_the_hooks_tell_is_served(observer: PrometheusObserver) -> None:
    hooks = make_hooks([observer])
    assert observer.url == "", "the port is taken at the first event"
    hooks.run_started(facts={"step": 4})
    for version in (5, 6):
        hooks.version_opened(version=version, facts={"replicas": ["rollout-0"]})
        replicas = {"rollout-0": {"outcome": "committed", "blocked_s": 0.02, "nbytes": 100}}
        facts = {"seconds": 0.2, "latency_s": 0.2, "rollout_blocked_s": 0.02, "sent_bytes": 128, "replicas": replicas}
        hooks.version_committed(version=version, facts=facts)
    hooks.version_aborted(version=7, facts={"error": "a reason", "seconds": 1.0})
    hooks.replica_quarantined(replica="rollout-1", facts={"version": 7, "error": "a reason"})
    step = {"seconds": 0.5, "tokens": 96, "waited_for_rollouts_s": 0.25, "reward": 0.5, "staleness_mean": 0.75}
    hooks.training_step(step=5, facts={**step, "staleness_max": 1, "tokens_per_s": 200.0, "overlap_share": 0.5})
    hooks.training_step(step=6, facts={**step, "trainer_blocked_s": 0.002, "published_version": 6})
    hooks.evaluated(step=6, facts={"accuracy": 0.75, "tasks": 8})
    assert hooks.reports == ()
    samples = scrape(observer.url)
    expected = {
        "weightlane_versions_committed_total": 2,
        "weightlane_versions_aborted_total": 1,
        "weightlane_replica_quarantines_total{replica=rollout-1}": 1,
        "weightlane_serving_version": 6,
        "weightlane_sync_latency_seconds_count": 2,
        "weightlane_sync_latency_seconds_sum": 0.4,
        "weightlane_sync_latency_seconds_bucket{le=0.1}": 0,
        "weightlane_sync_latency_seconds_bucket{le=0.3}": 2,
        "weightlane_rollout_blocked_seconds_sum{replica=rollout-0}": 0.04,
        "weightlane_trainer_blocked_seconds_count": 1,
        "weightlane_trainer_blocked_seconds_sum": 0.002,
        "weightlane_sent_bytes_total": 256,
        "weightlane_staged_bytes_total{replica=rollout-0}": 200,
        "weightlane_training_step": 6,
        "weightlane_training_step_seconds_sum": 1.0,
        "weightlane_trained_tokens_total": 192,
        "weightlane_waited_for_rollouts_seconds_total": 0.5,
        "weightlane_reward": 0.5,
        "weightlane_staleness_mean_versions": 0.75,
        "weightlane_staleness_max_versions": 1,
        "weightlane_generated_tokens_per_second": 200,
        "weightlane_overlap_ratio": 0.5,
        "weightlane_heldout_accuracy": 0.75,
    }
    assert {name: samples[name] for name in expected} == pytest.approx(expected)


def test_beyond_loopback_a_token_is_needed_and_whoever_lacks_it_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"0\.0\.0\.0 is not loopback: set WEIGHTLANE_PROMETHEUS_TOKEN"):
        PrometheusObserver(host="0.0.0.0")
    monkeypatch.setenv("WEIGHTLANE_PROMETHEUS_TOKEN", "s3cret")
    for observer in (prometheus_from_environment("0.0.0.0:0"), PrometheusObserver(token="s3cret")):
        url = f"http://127.0.0.1:{urlsplit(observer.start()).port}"
        for sent in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            status, text = get(url, **sent)
            assert (status, "weightlane" in text) == (401, False)
        assert get(url, Authorization="Bearer s3cret")[0] == 200
        observer.close()
    hosts = {"127.0.0.1": True, "::1": True, "localhost": True, "10.0.0.1": False, "::": False, "example.org": False}
    assert {host: is_loopback(host) for host in hosts} == hosts


def test_closing_frees_the_port_and_a_taken_port_is_an_error_at_the_start(free_port: int) -> None:
    observer = prometheus_from_environment(str(free_port))
    assert observer.start() == observer.start() == f"http://127.0.0.1:{free_port}/metrics"
    with pytest.raises(OSError, match="in use"):
        prometheus_from_environment(f"127.0.0.1:{free_port}").start()
    observer.close()
    assert observer.start() == "", "closed is closed"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", free_port))


def test_a_client_that_says_nothing_keeps_no_other_waiting(observer: PrometheusObserver) -> None:
    url = observer.start()
    host, port = urlsplit(url).hostname, urlsplit(url).port
    with socket.create_connection((host, port)), socket.create_connection((host, port)):
        assert get(url)[0] == 200
