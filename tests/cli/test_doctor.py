"""`dovetail doctor`, and what every command says when the file itself is the problem."""

from __future__ import annotations

import json
import resource
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from .conftest import SCRIPT, SECONDS, Outcome, Shell, environment

Command = Callable[..., Outcome]

FLOW = "name: f\nnodes: [{id: a, handler: input}]"
DB = ".dovetail/dovetail.db"


def findings(done: Outcome) -> dict[str, dict[str, object]]:
    return {found["check"]: found for found in json.loads(done.out)}


def test_doctor_passes_before_the_first_run_and_after_it(command: Command, shell: Shell) -> None:
    before = command("doctor")
    assert before.code == 0
    assert f"✓ file      {DB} is not there yet; the first run makes it" in before.out
    assert before.out.splitlines()[-1] == "all fine"
    shell.write("flow.yaml", FLOW)
    assert shell("run", "flow.yaml").code == 0
    after = command("doctor", "--json")
    assert after.code == 0
    found = findings(after)
    assert all(set(one) == {"check", "ok", "message", "fix"} for one in found.values())
    assert all(one["ok"] and one["fix"] is None for one in found.values())
    assert {"settings", "handlers", "file", "integrity"} <= set(found)


def test_invalid_settings_are_reported_with_a_fix(command: Command, shell: Shell) -> None:
    shell.write("dovetail.toml", "lease_seconds = -1\n")
    done = command("doctor")
    assert done.code == 1
    first, fix, verdict = done.out.splitlines()
    assert first.startswith("✗ settings  lease_seconds in dovetail.toml")
    assert "dovetail.toml" in fix
    assert verdict == "1 of 1 to fix"


def test_a_mistyped_variable_gives_a_warning_with_the_intended_name(shell: Shell) -> None:
    env = {
        "DOVETAIL_LEASE_SECOND": "20",
        "DOVETAIL_SECRET_KEY": "of-some-length",
        "DOVETAIL_DEBUG": "1",
        "ORCHESTRATOR_STALE_RESULT_TIMEOUT": "30",  # of a design
        "ORCHESTRATOR_OF_SOMEBODY_ELSE": "1",
        "DOVETAIL_WEB_SERVICE_HOST": "10.0.0.1",  # Kubernetes
    }
    done = shell("doctor", **env)
    assert done.code == 0
    lines = done.out.splitlines()
    ignored = "is not a Dovetail setting and is ignored (did you mean"
    for name, meant in (
        ("DOVETAIL_LEASE_SECOND", "DOVETAIL_LEASE_SECONDS"),
        ("ORCHESTRATOR_STALE_RESULT_TIMEOUT", "DOVETAIL_STALE_RESULT_TIMEOUT"),
    ):
        assert f"! variable  {name} {ignored} {meant}?)" in lines
        assert f"            set {meant} instead" in lines
    assert [line[0] for line in lines].count("!") == 2
    assert lines[-1] == "nothing to fix, 2 warnings"
    shell.write("flow.yaml", FLOW)
    assert shell("run", "flow.yaml", **env).code == 0, "it stops nothing"


def test_weak_or_unrestricted_secrets_give_warnings(shell: Shell) -> None:
    env = {
        "DOVETAIL_SECRET_FREE": "a-long-random-value",
        "DOVETAIL_SECRET_BOUND": "another-random-value",
        "DOVETAIL_SECRET_BOUND_HOSTS": "api.example.com",
        "DOVETAIL_SECRET_NONE_HOSTS": "api.example.com",
        "DOVETAIL_LLM_API_KEY": "token",
    }
    done = shell("doctor", "--json", **env)
    assert done.code == 0
    reported = [one for one in json.loads(done.out) if one["check"] == "secret"]
    key, orphan = [one["message"] for one in reported]
    assert key.startswith("DOVETAIL_LLM_API_KEY: it has fewer than 8 characters")
    assert orphan.startswith("DOVETAIL_SECRET_NONE_HOSTS binds the secret NONE to hosts")
    done = shell("doctor", "--json", **env, DOVETAIL_TOKENS="changeme,a-long-random-token:read")
    reported = [one for one in json.loads(done.out) if one["check"] == "secret"]
    messages = [one["message"] for one in reported]
    assert messages[1].startswith("token 1 of DOVETAIL_TOKENS: it is a common word")
    assert messages[3:] == ["every caller who may run workflows can send secret FREE to any host"]
    assert "DOVETAIL_SECRET_FREE_HOSTS=" in reported[3]["fix"]
    assert "random" not in done.out.replace("choose a random one", "")
    assert all(one["ok"] for one in reported)


def test_a_webhook_that_cannot_be_signed_is_reported_with_a_fix(shell: Shell) -> None:
    hooks = json.dumps([{"url": "https://example.com/hook", "secret": "HOOK"}])
    missing = shell("doctor", "--json", DOVETAIL_WEBHOOKS=hooks)
    assert missing.code == 1
    found = findings(missing)["webhooks"]
    assert "DOVETAIL_SECRET_HOOK is not set" in str(found["message"])
    assert "whsec_" in str(found["fix"])
    key = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldY"
    well = shell("doctor", "--json", DOVETAIL_WEBHOOKS=hooks, DOVETAIL_SECRET_HOOK=key)
    assert findings(well)["webhooks"]["message"] == "secret HOOK can sign"
    short = shell("doctor", "--json", DOVETAIL_WEBHOOKS=hooks, DOVETAIL_SECRET_HOOK="aword")
    assert "is short" in str(findings(short)["webhooks"]["message"])
    assert short.code == 0


def test_notifications_that_no_process_sends_are_reported(shell: Shell) -> None:
    shell.write("flow.yaml", FLOW)
    assert shell("run", "flow.yaml").code == 0
    with closing(sqlite3.connect(shell.directory / DB)) as file, file:
        file.execute("INSERT INTO outbox (id, due_at, content) VALUES ('m', 1000.0, '{}')")
        file.execute("INSERT INTO dead_letters (content) VALUES ('{}')")
    found = findings(shell("doctor", "--json"))
    assert "1 notification waits" in str(found["webhooks"]["message"])
    assert "1 notification was given up" in str(found["dead letters"]["message"])


def test_handlers_that_do_not_load_are_reported(command: Command) -> None:
    done = command("doctor", "--handlers", "none.py", "--json")
    assert done.code == 1
    assert "none.py" in str(findings(done)["handlers"]["message"])


def test_doctor_examines_redis_instead_of_the_file(shell: Shell, redis_url: str) -> None:
    done = shell("doctor", "--json", DOVETAIL_REDIS_URL=redis_url)
    assert done.code == 1
    found = findings(done)
    assert found["redis"]["ok"]
    assert "appendfsync is everysec" in str(found["persistence"]["message"])
    assert found["workers"]["fix"] == "dovetail worker"
    assert "file" not in found


def test_with_a_database_doctor_examines_redis_and_postgresql(
    shell: Shell, redis_url: str, postgres_url: str
) -> None:
    both = {"DOVETAIL_REDIS_URL": redis_url, "DOVETAIL_DATABASE_URL": postgres_url}
    found = findings(shell("doctor", "--json", **both))
    assert found["persistence"]["ok"], "with PostgreSQL `everysec` is enough"
    for check in ("database", "schema", "writable", "connections", "database clock", "agreement"):
        assert found[check]["ok"], found[check]
    wrong = {check for check, one in found.items() if not one["ok"]}
    # The database of the tests need not survive a power cut.
    assert wrong - {"durability"} == {"orchestrators", "workers"}


def test_an_unreachable_database_is_reported_and_redis_is_still_examined(
    shell: Shell, redis_url: str
) -> None:
    nowhere = "postgresql://somebody:secret@127.0.0.1:1/db"
    done = shell("doctor", DOVETAIL_REDIS_URL=redis_url, DOVETAIL_DATABASE_URL=nowhere)
    assert done.code == 1
    assert "cannot be reached" in done.out
    assert "DOVETAIL_DATABASE_URL names it" in done.out
    assert "✓ redis" in done.out
    assert "secret" not in done.out + done.err


def test_a_database_without_redis_is_reported(shell: Shell) -> None:
    done = shell("doctor", DOVETAIL_DATABASE_URL="postgresql://host/db")
    assert done.code == 1
    assert "set DOVETAIL_REDIS_URL, too, or unset DOVETAIL_DATABASE_URL" in done.out


def test_an_unreachable_redis_is_reported(shell: Shell) -> None:
    done = shell("doctor", DOVETAIL_REDIS_URL="redis://127.0.0.1:1/0")
    assert done.code == 1
    assert "start it, or correct DOVETAIL_REDIS_URL" in done.out
    assert "Traceback" not in done.err


def test_runs_without_an_owner_are_reported(command: Command, shell: Shell) -> None:
    shell.write("flow.yaml", "name: f\nnodes: [{id: a, handler: until, config: {file: go}}]")
    process = shell.start("run", "flow.yaml", "--handlers", "mine.py")
    shell.wait_for_start("a")
    assert command("doctor").code == 0
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = command("doctor")
    assert done.code == 1
    assert "dovetail runs resume" in done.out


def a_run_with(shell: Shell, change: Callable[[Path], object]) -> None:
    """Make a run, and then do something to its file."""
    shell.write("flow.yaml", FLOW)
    assert shell("run", "flow.yaml").code == 0
    change(shell.directory / DB)


def corrupt(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"this is no database at all")
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def from_the_future(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("change", "said"), [(corrupt, "damaged or no database"), (from_the_future, "newer Dovetail")]
)
def test_an_unusable_file_is_reported_in_one_line_by_every_command(
    shell: Shell, command: Command, change: Callable[[Path], object], said: str
) -> None:
    a_run_with(shell, change)
    for args in (
        ["runs", "list"],
        ["runs", "show", "--json"],
        ["runs", "cancel"],
        ["workflows", "list"],
        ["limits", "set", "t", "1"],
    ):
        done = command(*args)
        assert (done.code, done.out) == (1, ""), args
        assert done.err.startswith("error: ")
        assert said in done.err
        assert done.err.count("\n") == 1
    for args in (["run", "flow.yaml"], ["runs", "resume"], ["runs", "watch"]):
        ran = shell(*args)
        assert (ran.code, ran.out) == (1, ""), args
        assert said in ran.err
    reported = findings(command("doctor", "--json"))
    assert said in str(reported["file"]["message"])
    assert reported["file"]["fix"]


def test_a_folder_that_cannot_be_created_is_an_error(shell: Shell) -> None:
    shell.write("flow.yaml", FLOW)
    shell.write(".dovetail", "a file where the folder should be")
    done = shell("run", "flow.yaml")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: cannot make the folder .dovetail")


def test_a_full_disk_during_a_run_gives_one_line_the_next_step_and_exit_code_1(
    shell: Shell,
) -> None:
    shell.write(
        "large.py",
        "import asyncio\nfrom dovetail import handler\n"
        "@handler\nasync def large(config, ctx):\n"
        "    await asyncio.sleep(0.05)\n    return 'x' * 200_000\n",
    )
    nodes = [{"id": "n0", "handler": "large"}]
    nodes += [
        {"id": f"n{n}", "handler": "large", "dependencies": [f"n{n - 1}"]} for n in range(1, 30)
    ]
    shell.write("flow.json", json.dumps({"name": "f", "nodes": nodes}))

    def fill_up() -> None:  # as the disk would at two megabytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))

    done = subprocess.run(
        [SCRIPT, "run", "flow.json", "--handlers", "large.py"],
        cwd=shell.directory,
        env=environment(),
        capture_output=True,
        timeout=SECONDS,
        check=False,
        preexec_fn=fill_up,
    )
    err = done.stderr.decode()
    assert done.returncode == 1
    assert err.startswith("error: ")
    assert DB in err
    assert "Traceback" not in err
    _, next_step = err.splitlines()
    assert next_step.startswith("then go on with:  dovetail runs resume ")
    resumed = shell(*next_step.split()[5:])  # there is room again
    assert resumed.code == 0, resumed.err
    assert shell("runs", "verify").code == 0


def test_a_file_that_other_users_may_read_gives_a_warning_with_a_fix(shell: Shell) -> None:
    shell.write("flow.yaml", FLOW)
    assert shell("run", "flow.yaml").code == 0
    (shell.directory / DB).chmod(0o644)
    done = shell("doctor", "--json")
    assert done.code == 0
    found = findings(done)["access"]
    assert found["ok"]
    assert str(found["fix"]).startswith("chmod 600 ")
    assert DB in str(found["message"])
    assert (shell.directory / DB).stat().st_mode & 0o777 == 0o644


def test_a_file_with_a_token_that_other_users_may_read_gives_a_warning(shell: Shell) -> None:
    shell.write("ci_token", "0123456789abcdef")
    toml = shell.write("dovetail.toml", '[tokens.ci]\ntoken_file = "ci_token"\n')
    (shell.directory / "ci_token").chmod(0o644)
    toml.chmod(0o644)
    found = findings(shell("doctor", "--json"))["token"]
    assert found["ok"]
    assert found["message"] == "others on this machine may read ci_token, which has tokens.ci"
    assert found["fix"] == "chmod 600 ci_token"
    (shell.directory / "ci_token").chmod(0o600)
    assert "token" not in findings(shell("doctor", "--json"))
    (shell.directory / "ci_token").unlink()
    done = shell("doctor", "--json")
    assert done.code == 1
    assert "ci_token cannot be read" in str(findings(done)["settings"]["message"])


def test_doctor_says_how_long_finished_runs_are_kept(shell: Shell, redis_url: str) -> None:
    def said(**env: str) -> str:
        found = json.loads(shell("doctor", "--json", **env).out)
        (line,) = [one["message"] for one in found if one["check"] == "retained"]
        return str(line)

    assert said() == "finished runs are kept for ever"
    assert said(DOVETAIL_RETENTION_DAYS="0.5") == "finished runs are kept for 0.5 days"
    on_redis = {"DOVETAIL_REDIS_URL": redis_url}
    assert said(**on_redis) == "Redis keeps finished runs for 7 days"
    archived = {**on_redis, "DOVETAIL_DATABASE_URL": "postgresql://127.0.0.1:1/none"}
    assert said(**archived) == "Redis keeps finished runs for 7 days, PostgreSQL for ever"
    archived |= {"DOVETAIL_RETENTION_DAYS": "1", "DOVETAIL_ARCHIVE_RETENTION_DAYS": "365"}
    assert said(**archived) == "Redis keeps finished runs for 1 day, PostgreSQL for 365 days"


def test_doctor_warns_of_a_file_that_cannot_give_its_space_back(shell: Shell) -> None:
    path = shell.directory / ".dovetail" / "dovetail.db"
    shell.write("flow.yaml", "name: f\nnodes: [{id: a, handler: output}]\n")
    shell("run", "flow.yaml")
    assert "space" not in shell("doctor").out
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA auto_vacuum = 0")
        connection.execute("VACUUM")
        connection.execute("PRAGMA journal_mode = WAL")
    assert "not given back" in shell("doctor").out
