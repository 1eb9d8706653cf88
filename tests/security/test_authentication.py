"""Signatures and defaults: what a secret proves, and that nothing listens beyond this machine unasked."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import struct

import pytest
from sessions import Session

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError
from weightlane.ckpt_engines.channels.channel import derive_key, new_secret, proof, tag
from weightlane.ckpt_engines.conformance.processes.network import listeners
from weightlane.sync import Rendezvous

SECRET = new_secret()


def test_a_message_is_signed_by_hmac_sha256_over_its_place_its_head_and_its_payload() -> None:
    key, digest = b"k" * 32, hashlib.sha256(b"payload").digest()
    signed = struct.pack("<QI", 7, 4) + b"head" + digest
    assert tag(key, 7, b"head", digest) == hmac.digest(key, signed, hashlib.sha256)
    others = [(b"l" * 32, 7, b"head", digest), (key, 8, b"head", digest), (key, 7, b"hea", b"d" + digest[:31])]
    assert tag(key, 7, b"head", digest) not in {tag(*other) for other in others}
    assert proof(b"k", "ab", "c") != proof(b"k", "a", "bc"), "no part of one becomes a part of the next"


def test_a_secret_is_fresh_never_empty_and_gives_each_purpose_a_key_of_its_own() -> None:
    secrets = {new_secret() for _ in range(20)}
    assert len(secrets) == 20
    assert all(re.fullmatch(r"[0-9a-f]{64}", secret) for secret in secrets)
    one, other = derive_key(SECRET, "session/a"), derive_key(SECRET, "session/b")
    assert len(one) == len(other) == 32
    assert one == derive_key(SECRET, "session/a")
    assert one not in (other, derive_key(new_secret(), "session/a"))
    with pytest.raises(ConfigError):  # and is not taken for "no authentication"
        derive_key("", "p")


def test_no_listing_of_an_address_shows_its_secret() -> None:
    address = Rendezvous.host().address
    assert address.secret not in repr(address)
    assert address.secret not in str(address)
    assert address.to_plain()["secret"] == address.secret


def test_by_default_nothing_listens_beyond_this_machine() -> None:
    before = listeners(os.getpid())
    rendezvous = Rendezvous.host()
    engine = CheckpointEngineRegistry().create("gloo")
    session = Session(engine, "r")
    opened = listeners(os.getpid()) - before
    session.close()
    assert rendezvous.address.port in {socket.port for socket in opened}
    assert {socket.host for socket in opened} == {"127.0.0.1"}
