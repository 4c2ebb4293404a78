"""The address guard decides on resolved addresses. Nothing here connects anywhere."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address, ip_network

import pytest

from dovetail.core.errors import PermanentError
from dovetail.handlers.http import OutgoingRequest, _redirected, parse_url
from dovetail.handlers.http_rules import (
    Address,
    AddressGuard,
    parse_address,
    plain_host,
    system_resolver,
)

from ..core.pace import seconds_of

FORBIDDEN = [
    "127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255",
    "172.16.0.1", "172.31.255.255", "192.168.0.1", "169.254.169.254", "169.254.170.2",
    "100.64.0.1", "100.127.255.255", "192.0.0.8", "192.0.0.170", "192.0.2.1", "198.51.100.7",
    "203.0.113.9", "198.18.0.1", "198.19.255.255", "192.88.99.1", "224.0.0.1", "239.255.255.255",
    "240.0.0.1", "255.255.255.255",
    "::1", "::", "::127.0.0.1", "::8.8.8.8", "fc00::1", "fd12:3456::1", "fe80::1", "fe80::1%eth0",
    "fec0::1", "ff02::1", "2001:db8::1", "2001::1", "2001:0:7f00:1::", "2001:10::1", "3fff::1",
    "100::1", "5f00::1", "4000::1", "64:ff9b:1::1", "fd00:ec2::254",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:127.0.0.1",
    "2002:7f00:1::", "2002:a00:1::1", "2002:a9fe:a9fe::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "2a00::5efe:10.0.0.1", "2a00:1:2:3:200:5efe:127.0.0.1", "fe80::5efe:8.8.8.8",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2", "::ffff:0:0", "64:ff9b:1:7f00:0:100::", "2001:2::1",
    "fd00::5efe:8.8.8.8", "::ffff:0a00:0001", "0:0:0:0:0:0:0:1", "::2", "2001:20::1",
]  # fmt: skip

PUBLIC = [
    "8.8.8.8", "1.1.1.1", "93.184.216.34", "172.15.255.255", "172.32.0.1", "100.63.255.255",
    "100.128.0.1", "198.17.255.255", "198.20.0.1", "223.255.255.255", "9.255.255.255",
    "2606:4700:4700::1111", "2a00:1450:4001::1", "2620:fe::fe", "::ffff:8.8.8.8",
    "2002:808:808::1", "64:ff9b::808:808", "2a00::5efe:8.8.8.8", "2001:4860:4860::8888",
]  # fmt: skip


# Ways to write this machine, the cloud's metadata service or a private network in a URL. Each
# was a way around some check of the text.
HOSTILE_URLS = [
    "http://127.0.0.1/", "http://127.0.0.1:80/", "http://127.0.0.1:00080/", "HTTP://127.0.0.1/",
    "http://127.1/", "http://127.0.1/", "http://127.000.000.001/", "http://0177.0.0.1/",
    "http://0177.0.0.01/", "http://017700000001/", "http://0x7f.0x0.0x0.0x1/", "http://0x7f.1/",
    "http://0X7F000001/", "http://0x7f000001/", "http://2130706433/",
    "http://4294967295/", "http://0/", "http://0.0.0.0/", "http://00.0.0.0/", "http://127.65535/",
    "http://127.0.0.1./", "http://127.0.0.1.:80/", "http://localhost/", "http://LocalHost./",
    "http://①②⑦.⓪.⓪.①/", "http://１２７.０.０.１/", "http://127。0。0。1/", "http://127．0．0．1/",
    "http://127｡0｡0｡1/", "http://𝟏𝟐𝟕.𝟎.𝟎.𝟏/", "http://ⓛocalhost/", "http://ｌｏｃａｌｈｏｓｔ/",
    "http://LOCALHOſT/", "http://[::1]/", "http://[::1]:80/", "http://[0:0:0:0:0:0:0:1]/",
    "http://[0000:0000:0000:0000:0000:0000:0000:0001]/", "http://[::]/", "http://[::127.0.0.1]/",
    "http://[::ffff:127.0.0.1]/", "http://[::FFFF:7F00:1]/", "http://[0:0:0:0:0:ffff:127.0.0.1]/",
    "http://[::ffff:a9fe:a9fe]/", "http://[64:ff9b::127.0.0.1]/", "http://[64:ff9b::a9fe:a9fe]/",
    "http://[2002:7f00:1::]/", "http://[2002:a9fe:a9fe::1]/", "http://[2001:0:7f00:1::]/",
    "http://[2a00::5efe:127.0.0.1]/", "http://[fe80::1]/", "http://[fd00:ec2::254]/",
    "http://[fec0::1]/", "http://[ff02::1]/", "http://169.254.169.254/latest/meta-data/",
    "http://0xa9fea9fe/", "http://2852039166/", "http://0251.0376.0251.0376/", "http://169.16689662/",
    "http://0xA9.254.0251.254/", "http://10.1/", "http://192.168.257/", "http://172.16.1/",
    "http://100.64.0.1/", "http://198.18.0.1/", "http://224.0.0.1/", "http://255.255.255.255/",
    "http://example.com@127.0.0.1/", "http://example.com:80@127.0.0.1/", "http://a@b@127.0.0.1/",
    "http://u:p@127.0.0.1:80/", "http://127.0.0.1?@example.com/", "http://127.0.0.1#@example.com/",
    "http://127.0.0.1#.example.com/", "http://127.0.0.1/@example.com", "http://@127.0.0.1/",
    "http://:@127.0.0.1/", "http://example.com%40127.0.0.1/", "http://example.com%2f@127.0.0.1/",
    "http:127.0.0.1/", "http:/127.0.0.1/", "http:///127.0.0.1/", "http:////127.0.0.1/",
    "http:\\\\127.0.0.1/", "http://example.com\\@127.0.0.1/", "http://127.0.0.1\\.example.com/",
    "http://127%2e0%2e0%2e1/", "http://%31%32%37.0.0.1/", "http://127.0.0.1%00.example.com/",
    "http://127.0.0.1%20/", "http://127.0.0.1 .example.com/", "http://127.0.0.1\u200b/",
    "http://127.0.0.1\u00ad/", "http://[::1%25lo]/", "http://[::1%lo]/", "http://[fe80::1%25eth0]/",
    "http://[127.0.0.1]/", "http://[::1].example.com/",
    "http://127.0.0.1:80:80/", "http://127.0.0.1:８０/", "http://127.0.0.1:+80/",
    "http://127.0.0.1:65616/", "http://127.0.0.1:0/", "http://127.0.0.1:-1/", "//127.0.0.1/",
    "file:///etc/passwd", "gopher://127.0.0.1:6379/_", "dict://127.0.0.1:11211/", "ftp://127.0.0.1/",
    "unix:///var/run/docker.sock", "jar:http://127.0.0.1!/", "data:text/plain,x", "javascript:1",
    # Names that anybody can register or that a network has by itself.
    "http://localtest.me/", "http://127.0.0.1.nip.io/", "http://metadata.google.internal/",
    "http://host.docker.internal/", "http://ip6-localhost/", "http://kubernetes.default.svc/",
]  # fmt: skip
RESOLVED = {
    "localhost": "127.0.0.1",
    "localtest.me": "127.0.0.1",
    "127.0.0.1.nip.io": "127.0.0.1",
    "metadata.google.internal": "169.254.169.254",
    "host.docker.internal": "192.168.65.2",
    "ip6-localhost": "::1",
    "kubernetes.default.svc": "10.96.0.1",
}


def answering(*addresses: str):
    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses)

    return resolve


@pytest.mark.parametrize("address", FORBIDDEN)
async def test_an_address_that_is_not_public_is_refused_permanently(address: str):
    guard = AddressGuard(resolver=answering(address))
    with pytest.raises(PermanentError) as refused:
        await guard.addresses("innocent.example.com", 443)
    assert refused.value.type == "forbidden_address"
    assert str(parse_address(address)) in str(refused.value)
    assert "DOVETAIL_ALLOW_PRIVATE_ADDRESSES=" in str(refused.value)


@pytest.mark.parametrize("address", PUBLIC)
async def test_a_public_address_is_returned(address: str):
    guard = AddressGuard(resolver=answering(address))
    assert await guard.addresses("example.com", 443) == [parse_address(address)]


def test_every_address_that_python_calls_private_is_forbidden():
    guard = AddressGuard()
    for number in range(0, 2**32, 2**16 + 1):
        address = ip_address(number)
        if not address.is_global or address.is_multicast:
            assert guard.reason_against(address) is not None, address


async def numbers_and_known_names(host: str, port: int) -> list[str]:
    """As the operating system would answer, without asking anybody."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        assert host in RESOLVED, f"{host} would have been looked up"
        return [RESOLVED[host]]
    return [str(sockaddr[0]) for *_, sockaddr in found]


def test_there_are_enough_different_spellings():
    assert len(set(HOSTILE_URLS)) == len(HOSTILE_URLS) >= 100


async def decided(url: str) -> list[Address]:
    """As for a call: the host is read, resolved and judged, without a connection."""
    parsed = parse_url(url)
    guard = AddressGuard(resolver=numbers_and_known_names)
    return await guard.addresses(parsed.raw_host.decode(), parsed.port or 80)


@pytest.mark.parametrize("url", HOSTILE_URLS, ids=ascii)
async def test_no_spelling_of_a_url_bypasses_the_guard(url: str):
    with pytest.raises(PermanentError) as refused:
        await decided(url)
    assert refused.value.type in ("forbidden_address", "invalid_url")


def test_no_spelling_of_a_url_is_slow_to_check():
    async def all_decided() -> None:
        for url in HOSTILE_URLS:
            with pytest.raises(PermanentError):
                await decided(url)

    assert seconds_of(lambda: asyncio.run(all_decided()), enough=0.2) <= 0.2


@pytest.mark.parametrize("url", HOSTILE_URLS, ids=ascii)
async def test_no_redirect_bypasses_the_guard(url: str):
    first = OutgoingRequest("GET", parse_url("http://example.com/a"))
    try:
        moved = _redirected(first, 302, url)
    except PermanentError:
        return
    if moved.url.host == "example.com":  # what names no host is a place on the first one
        return
    with pytest.raises(PermanentError) as refused:
        await decided(str(moved.url))
    assert refused.value.type == "forbidden_address"


async def test_the_named_setting_allows_a_refused_address():
    refusing = AddressGuard(resolver=answering("10.1.2.3"))
    with pytest.raises(PermanentError) as refused:
        await refusing.addresses("db.internal", 80)
    network = str(refused.value).rpartition("=")[2]
    allowing = AddressGuard([ip_network(network)], answering("10.1.2.3"))
    assert await allowing.addresses("db.internal", 80) == [ip_address("10.1.2.3")]


async def test_an_allowed_network_allows_no_other_address():
    guard = AddressGuard([ip_network("127.0.0.1/32")])
    assert guard.reason_against(ip_address("127.0.0.1")) is None
    assert guard.reason_against(ip_address("127.0.0.2")) == "loopback"
    assert guard.reason_against(ip_address("::1")) == "loopback"
    assert guard.reason_against(ip_address("169.254.169.254")) is not None


async def test_a_mapped_address_counts_as_its_ipv4_address():
    guard = AddressGuard([ip_network("127.0.0.1/32")], answering("::ffff:127.0.0.1"))
    assert await guard.addresses("h", 80) == [ip_address("127.0.0.1")]


async def test_a_tunnel_to_an_allowed_address_is_allowed():
    guard = AddressGuard([ip_network("10.0.0.0/8")])
    assert guard.reason_against(ip_address("64:ff9b::a00:1")) is None
    assert "10.0.0.1" in (AddressGuard().reason_against(ip_address("64:ff9b::a00:1")) or "")


async def test_of_several_addresses_only_the_permitted_are_returned():
    guard = AddressGuard(resolver=answering("fd00::1", "127.0.0.1", "8.8.8.8", "8.8.8.8"))
    assert await guard.addresses("split.example.com", 443) == [ip_address("8.8.8.8")]


async def test_a_name_without_any_address_is_a_network_error():
    with pytest.raises(OSError, match="has no address"):
        await AddressGuard(resolver=answering()).addresses("nowhere.example.com", 80)


async def test_the_name_is_resolved_once():
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["8.8.8.8"]

    await AddressGuard(resolver=resolve).addresses("example.com", 80)
    assert asked == ["example.com"]


async def test_the_system_resolver_reads_every_spelling_of_loopback_as_loopback():
    for spelling in ("127.0.0.1", "2130706433", "0x7f.1", "0177.0.0.1", "127.1", "localhost"):
        answers = await system_resolver(plain_host(spelling), 80)
        assert {str(parse_address(answer)) for answer in answers} <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize(
    ("spelling", "plain"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("2130706433", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("0x7F.1", "127.0.0.1"),
        ("0177.0.0.1", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("①②⑦.⓪.⓪.①", "127.0.0.1"),
        ("127。0。0。1", "127.0.0.1"),
        ("１６９.254.169.254", "169.254.169.254"),
        ("0", "0.0.0.0"),
        ("LOCALHOST.", "localhost"),
        ("Example.COM", "example.com"),
        ("1.2.3.4 evil", "1.2.3.4 evil"),
        ("", ""),
        ("...", ""),
        ("bücher.example", "bücher.example"),
        ("256.256.256.256", "256.256.256.256"),
    ],
)
def test_a_host_has_one_canonical_spelling(spelling: str, plain: str):
    assert plain_host(spelling) == plain
