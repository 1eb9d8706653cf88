"""The service's socket."""

from __future__ import annotations

import asyncio
import socket

from waiting import HANG_S

from weightlane.trainer.service.http.server import listening


def test_answers_wait_for_no_acknowledgement() -> None:
    async def connected() -> bool:
        accepted = asyncio.Queue[asyncio.StreamWriter]()
        with listening("127.0.0.1", 0) as listener:
            server = await asyncio.start_server(lambda _, writer: accepted.put_nowait(writer), sock=listener.dup())
            with socket.create_connection(listener.getsockname(), HANG_S):
                writer = await asyncio.wait_for(accepted.get(), HANG_S)
                writer.close()
                server.close()
                sock = writer.get_extra_info("socket")
                return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    assert asyncio.run(connected())
