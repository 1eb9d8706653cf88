"""The service's socket."""

from __future__ import annotations

import asyncio
import socket

from waiting import HANG_S

from weightlane.trainer.service.http.server import listening


def test_answers_wait_for_no_acknowledgement() -> None:
    async def connected() -> bool:
        accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            accepted.set_result(bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        with listening("127.0.0.1", 0) as listener:
            server = await asyncio.start_server(note, sock=listener.dup())
            _, writer = await asyncio.open_connection(*listener.getsockname())
            try:
                async with asyncio.timeout(HANG_S):
                    return await accepted
            finally:
                writer.close()
                server.close()

    assert asyncio.run(connected())
