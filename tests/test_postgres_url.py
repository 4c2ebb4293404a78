"""The options of a PostgreSQL URL, as libpq has them, and settings that come from files."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from dovetail.config import SettingsError, load_settings, unknown_variables
from dovetail.core.errors import StoreError
from dovetail.postgres_url import connect_arguments, shown

BASE = "postgresql://user:hidden-password@db.example:6432/runs"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PGSSLMODE", "PGSSLROOTCERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


class TestOptions:
    def test_a_plain_url_is_not_changed(self) -> None:
        assert connect_arguments(BASE, 5.0) == {"dsn": BASE, "timeout": 5.0}
        assert connect_arguments(f"{BASE}?", 5.0) == {"dsn": BASE, "timeout": 5.0}

    @pytest.mark.parametrize(
        ("text", "seconds"), [("3", 3.0), ("0.5", 0.5), ("0", 60.0), ("900", 60.0), ("", 5.0)]
    )
    def test_connect_timeout_is_kept(self, text: str, seconds: float) -> None:
        arguments = connect_arguments(f"{BASE}?connect_timeout={text}", 5.0)
        assert arguments == {"dsn": BASE, "timeout": seconds}

    def test_options_without_effect_are_dropped_and_the_others_are_passed_on(self) -> None:
        given = f"{BASE}?keepalives=1&options=-c%20search_path%3Dx&application_name=a&gssencmode=no"
        dsn = connect_arguments(given, 5.0)["dsn"]
        assert dsn == f"{BASE}?options=-c%20search_path%3Dx&application_name=a"

    @pytest.mark.parametrize(
        ("option", "said"),
        [
            ("sslmod=require", "there is no option 'sslmod'; did you mean 'sslmode'"),
            ("zzz=1", "there is no option 'zzz'; it takes the options of libpq"),
            ("connect_timeout=soon", "connect_timeout is a number of seconds"),
            ("connect_timeout=-1", "connect_timeout is a number of seconds"),
            ("connect_timeout=nan", "connect_timeout is a number of seconds"),
            ("nonsense", "what follows '?' cannot be read"),
            ("sslmode=verify-full", "sslrootcert=system"),
            ("sslmode=verify-ca", "none in ~/.postgresql/root.crt"),
            ("sslmode=verify-full&sslrootcert=/no/ca.crt", "there is no file /no/ca.crt"),
            ("sslmode=require&sslrootcert=system", "needs sslmode=verify-full"),
        ],
    )
    def test_an_option_that_cannot_work_is_reported_without_the_password(
        self, option: str, said: str
    ) -> None:
        with pytest.raises(StoreError, match="DOVETAIL_DATABASE_URL") as raised:
            connect_arguments(f"{BASE}?{option}", 5.0)
        assert said in str(raised.value)
        assert "hidden-password" not in str(raised.value)

    def test_the_certificate_authorities_of_the_system_can_be_used(self) -> None:
        arguments = connect_arguments(f"{BASE}?sslmode=verify-full&sslrootcert=system", 5.0)
        assert arguments["dsn"] == BASE
        context = arguments["ssl"]
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)

    def test_an_existing_root_certificate_is_left_to_the_client(self, tmp_path: Path) -> None:
        (tmp_path / "ca.crt").write_text("x")
        given = f"{BASE}?sslmode=verify-full&sslrootcert={tmp_path}/ca.crt"
        assert "ssl" not in connect_arguments(given, 5.0)

    @pytest.mark.parametrize(
        ("url", "named"),
        [
            (BASE, "PostgreSQL at db.example:6432/runs"),
            ("postgresql:///runs", "PostgreSQL at localhost:5432/runs"),
            ("postgresql:///runs?host=/run/pg", "PostgreSQL at the socket in /run/pg"),
            ("postgresql://%2Frun%2Fpg/runs", "PostgreSQL at the socket in /run/pg"),
            ("postgresql://h:port/x", "PostgreSQL"),
        ],
    )
    def test_a_message_names_the_address_but_no_password(self, url: str, named: str) -> None:
        assert shown(url) == named


class TestFiles:
    def test_any_setting_may_come_from_a_file(self, tmp_path: Path) -> None:
        for name, text in {"url": f"{BASE}\n", "key": "k\n", "tokens": "a,b:read\n"}.items():
            (tmp_path / name).write_text(text)
        environ = {
            "DOVETAIL_DATABASE_URL_FILE": str(tmp_path / "url"),
            "DOVETAIL_LLM_API_KEY_FILE": str(tmp_path / "key"),
            "DOVETAIL_TOKENS_FILE": str(tmp_path / "tokens"),
            "DOVETAIL_SECRET_MAIL_FILE": str(tmp_path / "key"),
            "DOVETAIL_SECRET_OTHER": "plain",
        }
        found = load_settings(environ=environ, directory=tmp_path)
        assert (found.database_url, found.llm_api_key) == (BASE, "k")
        assert found.tokens == ("a", "b:read")
        assert found.secrets == {"MAIL": "k", "OTHER": "plain"}
        assert unknown_variables(environ) == {}

    def test_a_secret_keeps_all_but_its_last_newline(self, tmp_path: Path) -> None:
        (tmp_path / "pem").write_text(" two\nlines \n")
        environ = {"DOVETAIL_SECRET_PEM_FILE": str(tmp_path / "pem")}
        assert load_settings(environ=environ, directory=tmp_path).secrets["PEM"] == " two\nlines "

    @pytest.mark.parametrize("variable", ["DOVETAIL_TOKEN", "DOVETAIL_SECRET_KEY"])
    def test_a_problem_of_a_file_is_reported_with_its_variable(
        self, variable: str, tmp_path: Path
    ) -> None:
        (tmp_path / "empty").write_text(" \n")
        (tmp_path / "bytes").write_bytes(b"\xff\xfe")
        wrong = {"none": "No such file", "empty": "is empty", "bytes": "is not UTF-8"}
        for name, said in wrong.items():
            environ = {f"{variable}_FILE": str(tmp_path / name)}
            with pytest.raises(SettingsError, match=f"{variable}_FILE") as raised:
                load_settings(environ=environ, directory=tmp_path)
            assert said in str(raised.value)

    @pytest.mark.parametrize("variable", ["DOVETAIL_TOKEN", "DOVETAIL_SECRET_KEY"])
    def test_a_variable_together_with_its_file_variable_is_refused(
        self, variable: str, tmp_path: Path
    ) -> None:
        environ = {variable: "a", f"{variable}_FILE": str(tmp_path)}
        with pytest.raises(SettingsError, match="unset one of them"):
            load_settings(environ=environ, directory=tmp_path)
