"""The address guard decides on resolved addresses. Nothing here connects anywhere."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from dovetail.core.errors import PermanentError
from dovetail.handlers.addresses import (
    AddressGuard,
    parse_address,
    plain_host,
    system_resolver,
)

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
]  # fmt: skip

PUBLIC = [
    "8.8.8.8", "1.1.1.1", "93.184.216.34", "172.15.255.255", "172.32.0.1", "100.63.255.255",
    "100.128.0.1", "198.17.255.255", "198.20.0.1", "223.255.255.255", "9.255.255.255",
    "2606:4700:4700::1111", "2a00:1450:4001::1", "2620:fe::fe", "::ffff:8.8.8.8",
    "2002:808:808::1", "64:ff9b::808:808",
]  # fmt: skip


def answering(*addresses: str):
    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses)

    return resolve


@pytest.mark.parametrize("address", FORBIDDEN)
async def test_an_address_that_is_not_public_is_refused_for_good(address: str):
    guard = AddressGuard(resolver=answering(address))
    with pytest.raises(PermanentError) as refused:
        await guard.addresses("innocent.example.com", 443)
    assert refused.value.type == "forbidden_address"
    assert str(parse_address(address)) in str(refused.value)
    assert "DOVETAIL_ALLOW_PRIVATE_ADDRESSES=" in str(refused.value)


@pytest.mark.parametrize("address", PUBLIC)
async def test_a_public_address_is_handed_out(address: str):
    guard = AddressGuard(resolver=answering(address))
    assert await guard.addresses("example.com", 443) == [parse_address(address)]


def test_whatever_python_calls_private_is_forbidden_here_too():
    guard = AddressGuard()
    for number in range(0, 2**32, 2**16 + 1):
        address = ip_address(number)
        if not address.is_global or address.is_multicast:
            assert guard.reason_against(address) is not None, address


async def test_the_setting_that_would_allow_a_refused_address_allows_it():
    refusing = AddressGuard(resolver=answering("10.1.2.3"))
    with pytest.raises(PermanentError) as refused:
        await refusing.addresses("db.internal", 80)
    network = str(refused.value).rpartition("=")[2]
    allowing = AddressGuard([ip_network(network)], answering("10.1.2.3"))
    assert await allowing.addresses("db.internal", 80) == [ip_address("10.1.2.3")]


async def test_an_allowed_network_allows_nothing_beside_it():
    guard = AddressGuard([ip_network("127.0.0.1/32")])
    assert guard.reason_against(ip_address("127.0.0.1")) is None
    assert guard.reason_against(ip_address("127.0.0.2")) == "loopback"
    assert guard.reason_against(ip_address("::1")) == "loopback"
    assert guard.reason_against(ip_address("169.254.169.254")) is not None


async def test_a_mapped_address_counts_as_the_ipv4_address_it_is():
    guard = AddressGuard([ip_network("127.0.0.1/32")], answering("::ffff:127.0.0.1"))
    assert await guard.addresses("h", 80) == [ip_address("127.0.0.1")]


async def test_a_tunnel_to_an_allowed_address_is_allowed():
    guard = AddressGuard([ip_network("10.0.0.0/8")])
    assert guard.reason_against(ip_address("64:ff9b::a00:1")) is None
    assert "10.0.0.1" in (AddressGuard().reason_against(ip_address("64:ff9b::a00:1")) or "")


async def test_of_several_addresses_only_the_permitted_are_handed_out():
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
def test_a_host_has_one_plain_spelling(spelling: str, plain: str):
    assert plain_host(spelling) == plain
