"""`dovetail migrate`: the tables are there before any service has started."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..cli.conftest import Outcome, command, shell

__all__ = ["command", "shell"]

Command = Callable[..., Outcome]


def test_migrate_creates_the_tables_and_a_second_time_changes_nothing(
    command: Command, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_DATABASE_URL", postgres_url)
    for _ in range(2):
        done = command("migrate")
        assert (done.code, done.out) == (0, "PostgreSQL has the tables of this version\n")


def test_migrate_without_a_database_names_the_missing_setting(command: Command) -> None:
    done = command("migrate")
    assert done.code == 2
    assert "DOVETAIL_DATABASE_URL is not set" in done.err


def test_migrate_with_an_unreachable_database_is_an_error(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_DATABASE_URL", "postgresql://x@127.0.0.1:1/x")
    done = command("migrate")
    assert done.code == 1
    assert done.err.startswith("error: ")
