"""Shows that ./dev sets up once, mends what is broken and takes nothing away.

./dev runs as it is, in a small checkout of its own, with a uv that only writes down what it was
asked: no package index is needed, and the real environment stays out of it. What it must not
know: what is in the real requirements.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

UV = """#!/bin/sh
echo "uv $*" >>"$LOG"
[ "$1" = --version ] && exit 0
[ -z "$OFFLINE" ] || { echo "no route to the index" >&2; exit 2; }
for last; do :; done
if [ "$1" = venv ]; then
    mkdir -p "$last/bin"
    ln -s "$PYTHON" "$last/bin/python"
    printf '#!/bin/sh\\necho "dovetail $*"; exit 7\\n' >"$last/bin/dovetail"
    chmod +x "$last/bin/dovetail"
fi
[ -z "$SLOW" ] || sleep "$SLOW"
"""

# An apt-get that offers a Redis: installed into the tools, or as a package to unpack.
APT = """#!/bin/sh
echo "apt-get $*" >>"$LOG.apt"
[ -z "$OFFLINE" ] || { echo "no route to Debian" >&2; exit 100; }
case " $* " in
*" --print-uris "*)
    echo "'http://x/redis-tools.deb' redis-tools_5%3a7_amd64.deb 1991988 SHA256:0"
    echo "'http://x/perl-base.deb' perl-base_5_amd64.deb 9000000 SHA256:0" ;;
*" download "*)
    while [ "$1" != download ]; do shift; done
    shift
    for name; do : >"${name}_1_amd64.deb"; done ;;
*" install "*)
    [ -z "$LOCKED" ] || { echo "dpkg is locked" >&2; exit 100; }
    printf '#!/bin/sh\\n' >"$TOOLS/redis-server"
    chmod +x "$TOOLS/redis-server" ;;
esac
"""

DPKG = """#!/bin/sh
echo "dpkg-deb $*" >>"$LOG.apt"
[ -z "$EMPTY" ] || exit 0
mkdir -p "$3/usr/bin"
printf '#!/bin/sh\\n' >"$3/usr/bin/redis-server"
chmod +x "$3/usr/bin/redis-server"
"""

# What ./dev calls, for a PATH on which nothing else is. No systemctl, as in a container.
COMMANDS = """
cat chmod cmp cp dirname env id ln mkdir mv rm sed sh sleep tail tr
"""


class Checkout:
    """A checkout with ./dev, pins of its own, and a uv that writes down its calls."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.tools = folder / "tools"
        self.log = folder / "log"
        (self.root / "requirements").mkdir(parents=True)
        self.tools.mkdir()
        shutil.copy(ROOT / "dev", self.root)
        (self.root / "pyproject.toml").write_text("[project]\n")
        for name in ("run", "test", "bench"):
            text = f"# download: 1 MB, packages: 1\n{name}==1\n"
            (self.root / "requirements" / f"{name}.txt").write_text(text)
        self.add_tool("uv", UV)
        servers = ("redis-server", "postgres", "initdb", "rabbitmq-server", "pgbouncer")
        for server in (*servers, "promtool", "chromium"):
            self.add_tool(server, "#!/bin/sh\n")

    def add_tool(self, name: str, text: str) -> None:
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def replace_python(self, script: str) -> None:
        """The Python of .venv, by a line of shell."""
        python = self.root / ".venv" / "bin" / "python"
        python.unlink()
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)

    def without_redis(self, user: int) -> dict[str, str]:
        """The settings of a Debian that has no Redis yet, for a user of this number."""
        (self.tools / "redis-server").unlink()
        self.add_tool("apt-get", APT)
        self.add_tool("dpkg-deb", DPKG)
        for name in COMMANDS.split():
            (self.tools / name).symlink_to(shutil.which(name) or name)
        (self.tools / "id").unlink()
        self.add_tool("id", f"#!/bin/sh\necho {user}\n")
        return {"PATH": str(self.tools), "TOOLS": str(self.tools)}

    def apt_asked(self) -> list[str]:
        """What apt and dpkg were asked since the last look."""
        file = Path(f"{self.log}.apt")
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines

    @property
    def servers(self) -> Path:
        return self.root / ".boot" / "servers"

    def start(self, *words: str, **settings: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{self.tools}:{os.defpath}",
            "PYTHON": sys.executable,
            "LOG": str(self.log),
            "OFFLINE": "",
            "SLOW": "",
            "LOCKED": "",
            "EMPTY": "",
            **settings,
        }
        return subprocess.Popen(
            [self.root / "dev", *words],
            cwd=self.root.parent,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def dev(self, *words: str, **settings: str) -> tuple[int, str, str]:
        running = self.start(*words, **settings)
        out, err = running.communicate(timeout=60)
        return running.returncode, out, err

    def asked(self) -> list[str]:
        """What uv was asked since the last look, without the questions for its version."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line for line in lines if line != "uv --version"]

    @property
    def busy(self) -> Path:
        return self.root / ".venv" / ".dev" / "busy"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_first_start_installs_by_hash_and_builds_without_fetching(checkout: Checkout) -> None:
    code, out, err = checkout.dev("run", "validate", "a b.yaml")
    assert (code, out) == (7, "dovetail validate a b.yaml\n"), err
    made, pinned, built = checkout.asked()
    assert made.startswith("uv venv ")
    assert "--require-hashes" in pinned
    assert pinned.endswith("requirements/run.txt")
    assert "--no-deps --no-build-isolation -e " in built
    assert "1 MB" in err


def test_a_warm_start_does_not_call_uv_and_prints_nothing(checkout: Checkout) -> None:
    checkout.dev("run", "x")
    checkout.asked()
    before = os.times()
    for _ in range(5):
        assert checkout.dev("run", "x") == (7, "dovetail x\n", "")
    after = os.times()
    spent = after.children_user + after.children_system
    spent -= before.children_user + before.children_system
    assert spent / 5 < 0.3
    assert not checkout.log.exists()


def test_run_without_arguments_processes_the_sample_documents(checkout: Checkout) -> None:
    assert checkout.dev("run")[1] == "dovetail documents process examples/documents\n"


def test_test_after_run_extends_the_same_environment(checkout: Checkout) -> None:
    checkout.dev("run", "x")
    checkout.asked()
    checkout.dev("test", "--version")
    pinned, _ = checkout.asked()
    assert pinned.startswith("uv pip install ")
    assert pinned.endswith("requirements/test.txt")


def test_run_after_test_does_not_change_the_environment(checkout: Checkout) -> None:
    checkout.dev("test", "--version")
    checkout.asked()
    checkout.dev("run", "x")
    assert not checkout.asked()


@pytest.mark.parametrize("changed", ["requirements/run.txt", "pyproject.toml"])
def test_a_change_of_pins_or_project_installs_again(checkout: Checkout, changed: str) -> None:
    checkout.dev("run", "x")
    checkout.asked()
    with (checkout.root / changed).open("a") as file:
        file.write("\n")
    checkout.dev("run", "x")
    assert [line.split()[1] for line in checkout.asked()] == ["pip", "pip"]


def test_a_half_installed_environment_is_created_again(checkout: Checkout) -> None:
    checkout.dev("run", "x")
    checkout.busy.touch()
    checkout.asked()
    assert "left half made" in checkout.dev("run", "x")[2]
    assert checkout.asked()[0].startswith("uv venv ")
    assert not checkout.busy.exists()


def test_an_environment_without_its_python_is_created_again(checkout: Checkout) -> None:
    checkout.dev("run", "x")
    (checkout.root / ".venv" / "bin" / "python").unlink()
    code, out, err = checkout.dev("run", "x")
    assert (code, out) == (7, "dovetail x\n")
    assert "broken" in err


def test_an_environment_of_another_checkout_is_created_again(checkout: Checkout) -> None:
    checkout.dev("run", "x")
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    assert "made for another place" in checkout.dev("run", "x")[2]


def test_an_environment_that_the_user_created_is_used_and_not_removed(checkout: Checkout) -> None:
    folder = checkout.root / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    (folder / "mine").touch()
    checkout.dev("run", "x")
    assert (folder / "mine").exists()


def test_without_a_network_dev_says_so_and_the_next_start_continues(checkout: Checkout) -> None:
    (checkout.root / ".venv" / "bin").mkdir(parents=True)
    (checkout.root / ".venv" / "bin" / "python").symlink_to(sys.executable)
    code, out, err = checkout.dev("run", "x", OFFLINE="yes")
    assert (code, out) == (1, "")
    assert "no route to the index" in err
    assert "could not install requirements/run.txt" in err
    assert checkout.dev("run", "x")[:2] == (7, "dovetail x\n")


def test_two_concurrent_starts_install_once(checkout: Checkout) -> None:
    both = [checkout.start("run", "x", SLOW="0.2") for _ in range(2)]
    answers = [running.communicate(timeout=60) for running in both]
    assert [out for out, _ in answers] == ["dovetail x\n"] * 2
    assert len(checkout.asked()) == 3
    assert sum("waiting for another ./dev" in err for _, err in answers) == 1


def test_without_a_python_dev_names_the_required_version(checkout: Checkout) -> None:
    for name in ("dirname", "cat", "cmp", "tr"):
        (checkout.tools / name).symlink_to(shutil.which(name) or name)
    code, _, err = checkout.dev("run", PATH=str(checkout.tools), PYTHON="")
    assert code == 1
    assert "no Python 3.11 or newer" in err


# --- the servers of the tests ------------------------------------------------------------------


@pytest.mark.parametrize("command", ["test", "bench"])
def test_existing_servers_are_not_fetched(checkout: Checkout, command: str) -> None:
    checkout.add_tool("apt-get", APT)
    checkout.dev(command, "--version")
    assert not checkout.apt_asked()


def test_run_and_lint_need_no_servers(checkout: Checkout) -> None:
    settings = checkout.without_redis(user=1000)
    checkout.dev("run", "x", **settings)
    checkout.dev("lint", **settings)
    assert not checkout.apt_asked()


def test_a_given_server_is_not_fetched(checkout: Checkout) -> None:
    settings = checkout.without_redis(user=1000)
    checkout.dev("test", "--version", TEST_REDIS_URL="redis://elsewhere", **settings)
    assert not checkout.apt_asked()


def test_an_ordinary_user_gets_the_debian_package_unpacked_in_the_checkout_once(
    checkout: Checkout,
) -> None:
    settings = checkout.without_redis(user=1000)
    _, _, err = checkout.dev("test", "--version", **settings)
    asked = checkout.apt_asked()
    assert any(line.endswith(" update") for line in asked)
    assert any(line.endswith(" download redis-tools") for line in asked), "and not perl-base"
    assert not any(" -y" in line for line in asked)
    assert "downloading redis-server, 2 MB" in err
    assert (checkout.servers / "redis-server" / "usr" / "bin" / "redis-server").exists()
    assert [p.name for p in checkout.servers.iterdir()] == ["redis-server"]
    _, _, err = checkout.dev("test", "--version", **settings)
    assert not checkout.apt_asked()
    assert "redis" not in err


def test_tests_get_the_folder_of_the_servers(checkout: Checkout) -> None:
    settings = checkout.without_redis(user=1000)
    checkout.dev("test", "--version", **settings)
    checkout.replace_python('echo "$TEST_SERVERS_FOLDER"')
    assert checkout.dev("test", "--version", **settings)[1] == f"{checkout.servers}\n"


def test_tests_keep_their_byte_code_between_starts(checkout: Checkout) -> None:
    checkout.dev("test", "--version")
    checkout.replace_python('echo "${PYTHONDONTWRITEBYTECODE-kept}"')
    assert checkout.dev("test", "--version", PYTHONDONTWRITEBYTECODE="1")[1] == "kept\n"


@pytest.mark.parametrize(("given", "workers"), [("", "6"), ("redis://elsewhere", "1")])
def test_a_given_redis_serves_one_test_at_a_time(
    checkout: Checkout, given: str, workers: str
) -> None:
    checkout.dev("test", "--version")
    checkout.replace_python('echo "$*"')
    lines = checkout.dev("test", TEST_REDIS_URL=given)[1].splitlines()
    assert any(line.startswith(f"-m pytest -n {workers} --dist worksteal") for line in lines)
    assert lines[-1] == "tools/planted_bugs.py --passing --sixth"


def test_the_tests_are_compiled_once_in_a_fresh_clone(checkout: Checkout) -> None:
    checkout.dev("test", "--version")
    checkout.replace_python('echo "$*" >>calls')
    checkout.dev("test")
    (checkout.root / "tests" / "__pycache__").mkdir(parents=True)
    checkout.dev("test")
    calls = (checkout.root / "calls").read_text().splitlines()
    begun = [call.split()[2] for call in calls if "-m pytest" in call]
    assert begun == ["--collect-only", "-n", "-n"]


def test_root_in_a_container_gets_the_debian_package_installed(checkout: Checkout) -> None:
    settings = checkout.without_redis(user=0)
    _, _, err = checkout.dev("test", "--version", **settings)
    asked = checkout.apt_asked()
    assert asked[-1].split()[-2:] == ["install", "redis-server"]
    assert "downloading 11 MB" in err
    assert not checkout.servers.exists()
    checkout.dev("test", "--version", **settings)
    assert not checkout.apt_asked()


@pytest.mark.parametrize(("code", "again"), [(1, True), (2, False)])
def test_what_failed_beside_other_tests_runs_once_more_alone(
    checkout: Checkout, code: int, again: bool
) -> None:
    checkout.dev("test", "--version")
    checkout.replace_python(f'echo "$*"; case "$*" in *worksteal*) exit {code} ;; esac')
    done, out, err = checkout.dev("test")
    assert ("--last-failed" in out) is again
    assert done == (0 if again else code)
    assert ("FAILED: pytest" in err) is not again


@pytest.mark.parametrize("reason", ["apt-get fails", "systemd would start it"])
def test_root_gets_the_package_unpacked_if_it_cannot_be_installed(
    checkout: Checkout, reason: str
) -> None:
    settings = checkout.without_redis(user=0)
    if reason == "apt-get fails":
        settings["LOCKED"] = "yes"
    else:
        checkout.add_tool("systemctl", "#!/bin/sh\n")
    _, _, err = checkout.dev("test", "--version", **settings)
    assert ("dpkg is locked" in err) == (reason == "apt-get fails")
    assert (checkout.servers / "redis-server" / "usr" / "bin" / "redis-server").exists()
    assert not (checkout.tools / "redis-server").exists()


@pytest.mark.parametrize("user", [0, 1000])
def test_a_server_that_cannot_be_fetched_ends_the_tests(checkout: Checkout, user: int) -> None:
    settings = checkout.without_redis(user)
    checkout.dev("run", "x", **settings)
    (checkout.root / ".venv" / ".dev" / "test.txt").write_bytes(
        (checkout.root / "requirements" / "test.txt").read_bytes()
    )
    code, out, err = checkout.dev("test", "--version", OFFLINE="yes", **settings)
    assert (code, out) == (1, "")
    assert "no route to Debian" in err
    assert "could not fetch Debian's redis-server" in err
    assert "TEST_REDIS_URL" in err
    assert checkout.dev("test", "--version", **settings)[0] == 0


def test_a_package_without_its_server_ends_the_tests(checkout: Checkout) -> None:
    settings = checkout.without_redis(user=1000)
    code, _, err = checkout.dev("test", "--version", EMPTY="yes", **settings)
    assert code == 1
    assert "came without redis-server" in err


def test_without_debian_dev_names_the_servers_to_install(checkout: Checkout) -> None:
    settings = checkout.without_redis(user=1000)
    (checkout.tools / "apt-get").unlink()
    code, _, err = checkout.dev("test", "--version", **settings)
    assert code == 1
    assert "the tests need redis-server" in err


# --- clean -------------------------------------------------------------------------------------


def test_clean_removes_only_what_dev_created(checkout: Checkout) -> None:
    before = sorted(checkout.root.rglob("*"))
    (checkout.root / "src" / "__pycache__").mkdir(parents=True)
    (checkout.root / ".dovetail").mkdir()
    checkout.dev("test", "--version")
    assert checkout.dev("clean")[0] == 0
    kept = [checkout.root / ".dovetail", checkout.root / "src"]
    assert sorted(checkout.root.rglob("*")) == sorted([*before, *kept])
