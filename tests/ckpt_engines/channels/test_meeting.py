"""Where the framework's connections are made: at one address, or by a name that goes again."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from weightlane.ckpt_engines import ProtocolError, TransportError, toolkit
from weightlane.ckpt_engines.channels.listener import Listener
from weightlane.ckpt_engines.channels.local_socket import host_identity


def test_over_tcp_it_listens_on_one_address_and_what_it_says_of_itself_is_where_it_is_found() -> None:
    meeting = toolkit.TcpMeeting("127.0.0.1")
    listener = meeting.listen("sender s")
    target = meeting.target(listener.address, "receiver r", "s")
    assert target == listener.socket.getsockname()
    assert target[0] == "127.0.0.1"
    socket.create_connection(target).close()
    listener.close()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(target)


@pytest.mark.parametrize(
    "address", [{}, {"host": "h"}, {"host": "h", "port": "1"}, {"host": "h", "port": 2**16}, {"host": 1}]
)
def test_what_is_no_address_is_refused(address: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="not an address"):
        toolkit.TcpMeeting("127.0.0.1").target(address, "receiver r", "s")


def test_on_one_host_a_socket_has_a_name_until_it_is_closed(socket_dir: Path) -> None:
    meeting = toolkit.LocalMeeting(str(socket_dir))
    listener = meeting.listen("sender s")
    (path,) = socket_dir.iterdir()
    target = meeting.target(listener.address, "receiver r", "s")
    assert target == str(path)
    assert path.name == listener.address["socket"]
    with socket.socket(socket.AF_UNIX) as knocking:
        knocking.connect(target)
    listener.close()
    listener.close()
    assert list(socket_dir.iterdir()) == []


def test_a_name_that_cannot_be_removed_does_not_keep_a_listener_from_closing(tmp_path: Path) -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    listener = Listener(sock, {}, tmp_path / "file" / "name")
    (tmp_path / "file").touch()  # where its directory was
    listener.close()
    assert sock.fileno() == -1


def test_a_name_could_be_no_other_path_and_leads_to_no_other_host(socket_dir: Path) -> None:
    meeting = toolkit.LocalMeeting(str(socket_dir))
    name = "weightlane-0123456789abcdef.sock"
    assert meeting.target({"socket": name, "host": host_identity()}, "r", "s") == str(socket_dir / name)
    with pytest.raises(TransportError, match="another host"):
        meeting.target({"socket": name, "host": "elsewhere"}, "r", "s")
    for other in (f"../{name}", f"/run/{name}", "", None, 5):
        with pytest.raises(ProtocolError, match="not the name of a socket"):
            meeting.target({"socket": other, "host": host_identity()}, "r", "s")
