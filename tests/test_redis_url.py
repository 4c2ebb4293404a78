"""A Redis URL and its options: what is understood, and what is refused with the reason."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.config import SettingsError, load_settings
from dovetail.redis_client import url as redis_url
from dovetail.redis_client.url import WrongUrl, from_celery, read, to_celery


def test_a_url_with_every_part_is_parsed() -> None:
    found = read("rediss://me:p%40ss@h.example:7000/3?ssl_ca_certs=/ca.pem&client_name=api")
    assert found.addresses == (("h.example", 7000),)
    assert (found.username, found.password, found.db) == ("me", "p@ss", 3)
    assert found.tls is not None
    assert (found.tls.ca_certs, found.client_name) == ("/ca.pem", "api")
    assert found.greetings() == [
        ("AUTH", "me", "p@ss"),
        ("CLIENT", "SETNAME", "api"),
        ("SELECT", 3),
    ]


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("redis://", (("localhost", 6379),)),
        ("redis://h", (("h", 6379),)),
        ("redis://[::1]:7", (("::1", 7),)),
        ("redis+sentinel://a,b:7/m", (("a", 26379), ("b", 7))),
        ("rediss+sentinel://[fe80::1],[::2]:3/m", (("fe80::1", 26379), ("::2", 3))),
    ],
)
def test_hosts_and_ports_have_their_usual_defaults(
    url: str, addresses: tuple[tuple[str, int], ...]
) -> None:
    assert read(url).addresses == addresses


def test_sentinels_have_a_service_a_database_and_a_password_of_their_own() -> None:
    found = read("redis+sentinel://:pw@a,b/mymaster/2?sentinel_password=other")
    assert (found.service, found.db, found.password) == ("mymaster", 2, "pw")
    assert found.sentinel_greetings() == [("AUTH", "other")]
    assert found.shown() == "a:26379,b:26379/mymaster"


@pytest.mark.parametrize(
    ("url", "reported"),
    [
        ("http://h", "must begin with redis://"),
        ("rediss://h?ssl_ca_cert=/ca.pem", "no option 'ssl_ca_cert'; did you mean 'ssl_ca_certs'?"),
        ("redis://h?zzz=1", "no option 'zzz'; there are db, username"),
        ("redis://h?ssl_ca_certs=/ca.pem", "'ssl_ca_certs' needs TLS: begin with rediss://"),
        ("redis+sentinel://h/m?ssl_certfile=/c", "begin with rediss+sentinel://"),
        ("redis://h?sentinel_password=x", "is for redis+sentinel://"),
        ("rediss://h?ssl_cert_reqs=maybe", "'ssl_cert_reqs' is required or optional or none"),
        ("rediss://h?ssl_check_hostname=maybe", "'ssl_check_hostname' is true or false"),
        ("rediss://h?ssl_min_version=1.1", "'ssl_min_version' is 1.2 or 1.3"),
        ("rediss://h?ssl_keyfile=/k", "'ssl_keyfile' needs ssl_certfile"),
        ("rediss://h?ssl_ca_data=x", "write the certificate to a file"),
        ("redis://h?protocol=3", "'protocol' is 2: Dovetail reads replies in the form of RESP2"),
        ("redis://h?socket_timeout=1", "between 2 and 3600: Redis itself waits for a second"),
        ("redis://h?socket_timeout=nan", "is a number of seconds"),
        ("redis://h?socket_connect_timeout=no", "is a number of seconds"),
        ("redis://h?health_check_interval=-1", "is a number of seconds"),
        ("redis://h?max_connections=5", "would have no effect: every process keeps a few"),
        ("redis://h?retry_on_timeout=true", "would have no effect: what was not answered"),
        ("redis://h?client_name=two%20words", "is one word without blanks"),
        ("redis://h?db=1&db=2", "'db' is given twice"),
        ("redis://h?db", "cannot be read"),
        ("redis://h?password=", "has no value"),
        ("redis://h/zero", "the database is a number"),
        ("redis://h:70000", "its host and port cannot be read"),
        ("redis://a,b/0", "several hosts are sentinels"),
        ("redis+sentinel://a,b", "the name by which sentinels know the server is missing"),
        ("unix://host/a.sock", "a socket is named by its path alone"),
    ],
)
def test_an_impossible_url_is_refused_with_a_hint(url: str, reported: str) -> None:
    with pytest.raises(WrongUrl) as refused:
        read(url)
    assert reported in str(refused.value)
    with pytest.raises(SettingsError, match="DOVETAIL_REDIS_URL"):
        load_settings(environ={"DOVETAIL_REDIS_URL": url})


def test_timeout_and_name_options_are_kept() -> None:
    options = "socket_timeout=9&socket_connect_timeout=2.5&health_check_interval=30"
    found = read(f"redis://h?{options}&socket_keepalive=yes&protocol=2")
    assert (found.silence_seconds, found.connect_seconds, found.health_seconds) == (9, 2.5, 30)
    assert found.keepalive
    assert read("redis://h?health_check_interval=0").health_seconds is None


@given(st.text(string.ascii_lowercase + "_", min_size=1))
def test_an_option_is_supported_or_refused_by_name(name: str) -> None:
    try:
        read(f"rediss+sentinel://h/m?{name}=1")
    except WrongUrl as refused:
        assert f"'{name}'" in str(refused)  # noqa: PT017
    else:
        assert name in redis_url._OPTIONS


@given(st.text(string.printable, max_size=40))
def test_no_refusal_shows_a_password(rest: str) -> None:
    try:
        read(f"redis://user:correct-horse-battery@{rest}")
    except WrongUrl as refused:
        assert "correct-horse-battery" not in str(refused)  # noqa: PT017


_word = st.text(string.ascii_letters + string.digits + "@:/%?#;,", max_size=8)


@given(
    st.sampled_from(["redis", "rediss", "redis+sentinel", "rediss+sentinel"]),
    *(_word, _word),
    st.integers(0, 15),
    st.lists(st.sampled_from(["a", "b.example", "::1"]), min_size=1, max_size=3, unique=True),
)
def test_the_url_for_celery_means_the_same_server(
    scheme: str, username: str, password: str, db: int, hosts: list[str]
) -> None:
    sentinel = scheme.endswith("sentinel")
    tls = redis_url.Tls(ca_certs="/ca.pem", requirement="optional") if "rediss" in scheme else None
    target = redis_url.RedisUrl(
        scheme,
        tuple((host, 7) for host in hosts[: None if sentinel else 1]),
        service="mymaster" if sentinel else "",
        username=username if password else "",
        password=password,
        db=db,
        tls=tls,
    )
    place = to_celery(target)
    back = from_celery(place.url.split(";"), place.use_ssl, place.transport_options)
    assert back is not None
    assert read(back) == target


def test_an_option_that_only_celery_knows_is_passed_on() -> None:
    assert from_celery(["redis://h:1/0?visibility_timeout=5"], None, {}) == "redis://h:1/0"


def test_a_broker_is_checked_like_the_redis_url() -> None:
    for url in ("rediss://h?ssl_ca_cert=x", "sentinel://h:26379"):
        with pytest.raises(SettingsError, match="DOVETAIL_BROKER_URL"):
            load_settings(environ={"DOVETAIL_BROKER_URL": url})
    assert load_settings(environ={"DOVETAIL_BROKER_URL": "amqp://h//?x=y"}).broker_url


def test_passwords_in_url_options_are_secrets() -> None:
    url = "redis+sentinel://h/m?sentinel_password=correct-horse&password=battery-staple"
    known = load_settings(environ={"DOVETAIL_REDIS_URL": url}).sensitive().values()
    assert {"correct-horse", "battery-staple"} <= set(known)
