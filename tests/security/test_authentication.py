"""Signatures and defaults: what a secret proves, and that nothing listens beyond this machine unasked."""

from __future__ import annotations

import hashlib
import hmac
import re
import struct

import psutil
import pytest
from sessions import Session

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError, ProtocolError
from weightlane.ckpt_engines.mac import derive_key, new_secret, proof, proves, sign, verify
from weightlane.sync import Rendezvous

SECRET = new_secret()


def test_a_secret_is_fresh_and_has_256_bits() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(re.fullmatch(r"[0-9a-f]{64}", secret) for secret in secrets)


def test_the_signature_is_hmac_sha256_over_use_context_and_body_with_their_lengths() -> None:
    signed = b"".join(struct.pack("<Q", len(part)) + part for part in (b"message", b"inbox/a", b"body"))
    mac = hmac.digest(SECRET.encode(), signed, hashlib.sha256).hex().encode()
    assert sign(SECRET, "inbox/a", b"body") == mac + b"body"
    assert verify(SECRET, "inbox/a", mac + b"body") == b"body"
    assert proof(b"k", "ab", "c") != proof(b"k", "a", "bc"), "no part of one becomes a part of the next"


@pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 100])
def test_only_the_secret_and_the_place_it_was_signed_for_open_an_envelope(body: bytes) -> None:
    envelope = sign(SECRET, "inbox/a", body)
    assert verify(SECRET, "inbox/a", envelope) == body
    for secret, context, changed in (
        (new_secret(), "inbox/a", envelope),
        (SECRET, "inbox/b", envelope),
        (SECRET, "inbox/", b"a" + envelope),
        (SECRET, "inbox/a", envelope + b"!"),
        (SECRET, "inbox/a", envelope[:-1]),
        (SECRET, "inbox/a", envelope[:64].upper() + body),
        (SECRET, "inbox/a", body),
        (SECRET, "inbox/a", b""),
    ):
        with pytest.raises(ProtocolError, match="not signed"):
            verify(secret, context, changed)


def test_keys_of_two_purposes_have_nothing_in_common_with_each_other_or_with_signatures() -> None:
    one, other = derive_key(SECRET, "session/a"), derive_key(SECRET, "session/b")
    assert len(one) == len(other) == 32
    assert one != other
    assert one == derive_key(SECRET, "session/a")
    assert sign(SECRET, "session/a", b"")[:64] != one.hex().encode()


@pytest.mark.parametrize("claim", ["", "0" * 64, None, 5, ["x"], "\ud800", proof(b"other", "label")])
def test_a_wrong_proof_proves_nothing(claim: object) -> None:
    assert proves(b"key", proof(b"key", "label"), "label")
    assert not proves(b"key", claim, "label")


def test_an_empty_secret_is_refused_and_not_taken_for_no_authentication() -> None:
    for call in (lambda: sign("", "c", b""), lambda: verify("", "c", b"x" * 64), lambda: derive_key("", "p")):
        with pytest.raises(ConfigError):
            call()


def test_no_listing_of_an_address_shows_its_secret() -> None:
    address = Rendezvous.host().address
    assert address.secret not in repr(address)
    assert address.secret not in str(address)
    assert address.to_plain()["secret"] == address.secret


def listening() -> set[tuple[str, int]]:
    """Addresses on which this process listens."""
    links = psutil.Process().net_connections("inet")
    return {(link.laddr.ip, link.laddr.port) for link in links if link.status == psutil.CONN_LISTEN}


def test_by_default_nothing_listens_beyond_this_machine() -> None:
    before = listening()
    rendezvous = Rendezvous.host()
    engine = CheckpointEngineRegistry().create("gloo")
    session = Session(engine, "r")
    opened = listening() - before
    session.close()
    assert rendezvous.address.port in {port for _, port in opened}
    assert {host for host, _ in opened} == {"127.0.0.1"}
