"""Reads a Prometheus endpoint as a scraper does."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from waiting import HANG_S


def get(url: str, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=HANG_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def scrape(url: str, **headers: str) -> dict[str, float]:
    """Samples as ``name{label=value}`` to value."""
    status, text = get(url, **headers)
    assert status == 200, text
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
