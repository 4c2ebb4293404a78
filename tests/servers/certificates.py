"""Certificates of a private authority, made here: nothing on the machine has to be able to.

X.509 in DER, signed with ECDSA on P-256 in plain Python. It is quick enough for tests and protects
nothing: the arithmetic takes as long as the secret has bits.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

# The curve P-256 (FIPS 186-4, D.1.2.3).
P = 2**256 - 2**224 + 2**192 + 2**96 - 1
N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
Point = tuple[int, int]

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and of its key."""

    certificate: Path
    key: Path


class Authority:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._secret = secrets.randbelow(N - 1) + 1
        self._id = hashlib.sha1(_public(self._secret), usedforsecurity=False).digest()
        extensions = [
            _extension("2.5.29.19", _sequence(b"\x01\x01\xff"), critical=True),
            _extension("2.5.29.15", _tagged(0x03, b"\x01\x06"), critical=True),
            _extension("2.5.29.14", _tagged(0x04, self._id)),
        ]
        made = self._signed(name, self._secret, extensions, -DAY, DAY)
        self.certificate = _written(folder / f"{name}.crt", "CERTIFICATE", made)

    def pair(
        self,
        name: str,
        hosts: Sequence[str] = (),
        *,
        begins: timedelta = -DAY,
        ends: timedelta = DAY,
    ) -> Pair:
        """A certificate for a server at these hosts, or for a client; valid from and to so long
        from now."""
        secret = secrets.randbelow(N - 1) + 1
        extensions = [
            _extension("2.5.29.35", _sequence(_tagged(0x80, self._id))),
            _extension("2.5.29.19", _sequence(), critical=True),
        ]
        if hosts:
            extensions.append(_extension("2.5.29.17", _sequence(*map(_host, hosts))))
        made = self._signed(name, secret, extensions, begins, ends)
        octets = _tagged(0x04, secret.to_bytes(32))
        key = _sequence(_integer(1), octets, _tagged(0xA0, _oid("1.2.840.10045.3.1.7")))
        return Pair(
            _written(self._folder / f"{name}.crt", "CERTIFICATE", made),
            _written(self._folder / f"{name}.key", "EC PRIVATE KEY", key),
        )

    def _signed(
        self, name: str, secret: int, extensions: list[bytes], begins: timedelta, ends: timedelta
    ) -> bytes:
        now = datetime.now(UTC)
        algorithm = _sequence(_oid("1.2.840.10045.4.3.2"))
        curve = _sequence(_oid("1.2.840.10045.2.1"), _oid("1.2.840.10045.3.1.7"))
        body = _sequence(
            _tagged(0xA0, _integer(2)),
            _integer(secrets.randbits(63) + 1),
            algorithm,
            _named(self._name),
            _sequence(_time(now + begins), _time(now + ends)),
            _named(name),
            _sequence(curve, _tagged(0x03, b"\x00" + _public(secret))),
            _tagged(0xA3, _sequence(*extensions)),
        )
        return _sequence(body, algorithm, _tagged(0x03, b"\x00" + _signature(body, self._secret)))


# ── the curve ────────────────────────────────────────────────────────────────────────────


def _add(one: Point | None, other: Point | None) -> Point | None:
    if one is None or other is None:
        return other if one is None else one
    if one[0] == other[0]:
        if (one[1] + other[1]) % P == 0:
            return None
        slope = (3 * one[0] * one[0] - 3) * pow(2 * one[1], -1, P)
    else:
        slope = (other[1] - one[1]) * pow(other[0] - one[0], -1, P)
    x = (slope * slope - one[0] - other[0]) % P
    return x, (slope * (one[0] - x) - one[1]) % P


def _times(count: int, point: Point) -> Point:
    total: Point | None = None
    double: Point | None = point
    while count:
        if count & 1:
            total = _add(total, double)
        double = _add(double, double)
        count >>= 1
    assert total is not None
    return total


def _public(secret: int) -> bytes:
    x, y = _times(secret, G)
    return b"\x04" + x.to_bytes(32) + y.to_bytes(32)


def _signature(message: bytes, secret: int) -> bytes:
    digest = int.from_bytes(hashlib.sha256(message).digest())
    nonce = secrets.randbelow(N - 1) + 1
    r = _times(nonce, G)[0] % N
    s = pow(nonce, -1, N) * (digest + r * secret) % N
    return _sequence(_integer(r), _integer(s))


# ── DER ──────────────────────────────────────────────────────────────────────────────────


def _tagged(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes([tag, 0x80 | len(length)]) + length + content


def _sequence(*parts: bytes) -> bytes:
    return _tagged(0x30, b"".join(parts))


def _integer(value: int) -> bytes:
    return _tagged(0x02, value.to_bytes(value.bit_length() // 8 + 1))


def _oid(dotted: str) -> bytes:
    first, second, *rest = map(int, dotted.split("."))
    content = bytearray([first * 40 + second])
    for number in rest:
        groups = [number & 0x7F]
        while number := number >> 7:
            groups.append(0x80 | number & 0x7F)
        content += bytes(reversed(groups))
    return _tagged(0x06, bytes(content))


def _named(name: str) -> bytes:
    pair = _sequence(_oid("2.5.4.3"), _tagged(0x0C, name.encode()))
    return _sequence(_tagged(0x31, pair))


def _time(moment: datetime) -> bytes:
    return _tagged(0x17, moment.strftime("%y%m%d%H%M%SZ").encode())


def _extension(oid: str, content: bytes, *, critical: bool = False) -> bytes:
    marked = b"\x01\x01\xff" if critical else b""
    return _sequence(_oid(oid), marked, _tagged(0x04, content))


def _host(host: str) -> bytes:
    try:
        return _tagged(0x87, ipaddress.ip_address(host).packed)
    except ValueError:
        return _tagged(0x82, host.encode())


def _written(path: Path, kind: str, content: bytes) -> Path:
    text = base64.encodebytes(content).decode()
    path.write_text(f"-----BEGIN {kind}-----\n{text}-----END {kind}-----\n")
    return path
