"""A real S3 API on loopback, served by moto from memory. Prints its URL and ends with its standard input."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

OLD = "unconditional"
"""A bucket whose writes ignore their conditions, as those of S3 did before 2024."""


def make_atomic() -> None:
    """Let one write at a time check its condition and be stored, as in S3: moto's threads do both without a lock."""
    put, lock = S3Response.put_object, threading.Lock()

    def put_object(self: Any) -> Any:
        if self.bucket_name == OLD:
            self.headers = {name: each for name, each in self.headers.items() if not name.startswith("If-")}
        with lock:
            return put(self)

    S3Response.put_object = put_object


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    make_atomic()
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
