"""`dovetail doctor`: what could stop runs from working here, each with its fix."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.cli.options import AsJson, Handlers, declarations, on_target
from dovetail.cli.output import FAILED, InvalidInput, document_if, json_bytes, print_lines
from dovetail.cli.target import target_settings
from dovetail.cli.text import Line, counted, pad, plain
from dovetail.core.errors import DovetailError, StoreError

if TYPE_CHECKING:
    from dovetail.config import Settings

app = declarations()


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A finding. One that is `ok` and has a `fix` is a warning."""

    check: str
    ok: bool
    message: str
    fix: str | None = None


@app.command()
@on_target
def doctor(handlers: Handlers = None, as_json: AsJson = False) -> int:
    """Check settings, handlers, and where runs are kept. Exit code: 0 fine, 1 not.

    That is the file, or Redis and PostgreSQL with the services on them.
    """
    with document_if(as_json) as write:
        findings = list(_findings(handlers or ()))
        if write is not None:
            write(json_bytes([asdict(finding) for finding in findings]))
    if not as_json:
        print_lines(_lines(findings))
    return 0 if all(finding.ok for finding in findings) else FAILED


def _lines(findings: Sequence[CheckResult]) -> Iterator[Line]:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        sign = ("✗", "bad")
        if finding.ok:
            sign = ("!", "wait") if finding.fix else ("✓", "good")
        name = (f" {pad(finding.check, width)}  ", "" if finding.ok else "bold")
        yield [sign, name, (plain(finding.message), "")]
        if finding.fix:
            yield [(" " * (width + 4), ""), (plain(finding.fix), "wait")]
    bad = sum(not finding.ok for finding in findings)
    warned = sum(finding.ok and finding.fix is not None for finding in findings)
    if bad:
        yield [(f"{bad} of {len(findings)} to fix", "bold bad")]
    elif warned:
        yield [(f"nothing to fix, {counted(warned, 'warning')}", "bold wait")]
    else:
        yield [("all fine", "bold good")]


def _findings(handlers: Sequence[str]) -> Iterator[CheckResult]:
    import asyncio

    from dovetail.config import FILE, SettingsError

    try:
        settings = target_settings()
    except (SettingsError, InvalidInput) as error:
        yield CheckResult("settings", False, str(error), f"correct it in {FILE} or the environment")
        return
    source = FILE if Path(FILE).exists() else "the environment and defaults"
    yield CheckResult("settings", True, f"read from {source}")
    yield from _unknown_variables()
    if settings.server is not None:
        yield from asyncio.run(_server(settings))  # it has its own settings, handlers and store
        return
    yield from _archive(settings)
    yield from _secrets(settings)
    yield from _webhooks(settings)
    yield from _token_files(settings)
    yield _handlers(settings, handlers)
    yield _retention(settings)
    if settings.redis_url is not None:
        yield from asyncio.run(_redis(settings))
    elif settings.db.exists():
        yield from asyncio.run(_file(settings))
    else:
        yield _place_for_a_file(settings.db)


def _unknown_variables() -> Iterator[CheckResult]:
    """Warnings: they stop nothing, and another program may use them."""
    from dovetail.config import unknown_variables

    for name, meant in unknown_variables().items():
        hint = f" (did you mean {meant}?)" if meant else ""
        fix = f"set {meant} instead" if meant else "unset it, if it was meant for Dovetail"
        message = f"{name} is not a Dovetail setting and is ignored{hint}"
        yield CheckResult("variable", True, message, fix)


def _archive(settings: Settings) -> Iterator[CheckResult]:
    from dovetail.config import env_name, load_settings

    # As it is set, whatever --embedded says: with Redis the archive has its use.
    if settings.database_url is not None and load_settings().redis_url is None:
        name, other = env_name("database_url"), env_name("redis_url")
        message = f"{name} is set and {other} is not: runs are kept in {settings.db} alone"
        yield CheckResult("archive", False, message, f"set {other}, too, or unset {name}")


def _secrets(settings: Settings) -> Iterator[CheckResult]:
    """Warnings: secrets that are too weak to be masked, and secrets that may go to any host."""
    from dovetail.config import HOSTS_SUFFIX, SECRET_PREFIX, env_name, hosts_variable
    from dovetail.core.redaction import weakness

    named = {f"{SECRET_PREFIX}{name}": value for name, value in settings.secrets.items()}
    for field in ("llm_api_key", "token"):
        named[env_name(field)] = getattr(settings, field) or ""
    for number, token in enumerate(settings.tokens, start=1):
        named[f"token {number} of {env_name('tokens')}"] = token.removesuffix(":read")
    named |= {f"tokens.{name}": entry.token for name, entry in settings.named_tokens.items()}
    for name, value in named.items():
        if value and (why := weakness(value)) is not None:
            message = f"{name}: {why}, so it is masked only where it is a whole value or word"
            yield CheckResult(
                "secret", True, message, "choose a random one of 16 characters or more"
            )
    for name in sorted(settings.secret_hosts.keys() - settings.secrets.keys()):
        message = f"{hosts_variable(name)} binds the secret {name} to hosts, and there is none"
        fix = f"set {SECRET_PREFIX}{name}; what ends in {HOSTS_SUFFIX} is never a secret itself"
        yield CheckResult("secret", True, message, fix)
    if settings.tokens or settings.named_tokens:
        for name in sorted(settings.secrets.keys() - settings.secret_hosts.keys()):
            message = f"every caller who may run workflows can send secret {name} to any host"
            fix = f"set {hosts_variable(name)}=api.example.com,*.example.org, or * to allow that"
            yield CheckResult("secret", True, message, fix)


def _webhooks(settings: Settings) -> Iterator[CheckResult]:
    """Whether the webhooks of all runs can be signed here."""
    from dovetail.core.webhooks import WrongWebhookSecret, check_secret, is_weak

    for name in sorted({one.secret for one in settings.webhooks if one.secret is not None}):
        try:
            secret = check_secret(name, settings.secrets)
        except WrongWebhookSecret as error:
            fix = f"set DOVETAIL_SECRET_{name}=whsec_…, where the orchestrator or `serve` runs"
            yield CheckResult("webhooks", False, str(error), fix)
        else:
            short = f"the key of secret {name} is short, and may be guessed"
            longer = "take a longer one: echo whsec_$(openssl rand -base64 32)"
            well = CheckResult("webhooks", True, f"secret {name} can sign")
            yield CheckResult("webhooks", True, short, longer) if is_weak(secret) else well


def _token_files(settings: Settings) -> Iterator[CheckResult]:
    """Warnings: files with tokens that other users of this machine may read."""
    from dovetail.config import FILE

    exposed: dict[Path, list[str]] = {}
    for name, entry in settings.named_tokens.items():
        exposed.setdefault(entry.file or Path(FILE), []).append(f"tokens.{name}")
    for path, names in exposed.items():
        if path.stat().st_mode & 0o077:
            message = f"others on this machine may read {path}, which has {', '.join(names)}"
            yield CheckResult("token", True, message, f"chmod 600 {path}")


def _handlers(settings: Settings, specs: Sequence[str]) -> CheckResult:
    from dovetail.handlers.builtin import load_registry

    try:
        known = load_registry(settings, specs).handlers()
    except DovetailError as error:
        return CheckResult("handlers", False, str(error), "correct it, or do not load it")
    return CheckResult("handlers", True, f"{len(known)} known")


def _retention(settings: Settings) -> CheckResult:
    """How long finished runs are kept, as the settings say."""

    def kept(days: float | None) -> str:
        return "for ever" if days is None else f"for {days:g} {'day' if days == 1 else 'days'}"

    if settings.redis_url is None:
        message = f"finished runs are kept {kept(settings.retention_days)}"
        return CheckResult("retained", True, message)
    message = f"Redis keeps finished runs {kept(settings.redis_retention_days)}"
    if settings.database_url is not None:
        message += f", PostgreSQL {kept(settings.archive_retention_days)}"
    return CheckResult("retained", True, message)


def _place_for_a_file(path: Path) -> CheckResult:
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if os.access(folder, os.W_OK):
        return CheckResult("file", True, f"{path} is not there yet; the first run makes it")
    return CheckResult("file", False, f"{folder} cannot be written", _another_file())


async def _file(settings: Settings) -> list[CheckResult]:
    """The findings of the store itself about its file and the runs in it."""
    from dovetail.wiring.embedded import attached

    try:
        async with attached(settings) as commands:
            found = await commands.records.doctor()
    except StoreError as error:
        return [CheckResult("file", False, str(error), _another_file())]
    return _results(found)


async def _server(settings: Settings) -> list[CheckResult]:
    """Whether the server accepts the token, and has a worker."""
    from dovetail.client import http_client
    from dovetail.config import env_name

    with http_client():
        from dovetail.client.connection import (
            HOW_TO_GIVE_A_TOKEN,
            AccessDenied,
            ServerConnection,
            ServerUnreachable,
        )
    assert settings.server is not None  # noqa: S101
    try:
        async with ServerConnection(settings.server, settings.token) as server:
            workers = (await server.call("GET", "/api/v1/workers"))["items"]
    except AccessDenied as error:
        return [CheckResult("server", False, str(error), HOW_TO_GIVE_A_TOKEN)]
    except ServerUnreachable as error:
        return [CheckResult("server", False, str(error), "start it there:  dovetail serve")]
    except DovetailError as error:
        return [CheckResult("server", False, str(error), f"see its log, or {env_name('server')}")]
    alive = sum(bool(worker["alive"]) for worker in workers)
    return [
        CheckResult("server", True, f"{settings.server} answers"),
        CheckResult("workers", bool(alive), f"{alive} alive", None if alive else "dovetail worker"),
    ]


async def _redis(settings: Settings) -> list[CheckResult]:
    """The findings of Redis, the broker and PostgreSQL; with them, no file is used."""
    import asyncio

    from dovetail.wiring.embedded import broker_findings, database_findings, redis_findings

    found = await asyncio.gather(
        redis_findings(settings), broker_findings(settings), database_findings(settings)
    )
    return _results([finding for part in found for finding in part])


def _results(found: Sequence[tuple[str, bool, str, str]]) -> list[CheckResult]:
    return [CheckResult(check, ok, message, fix or None) for check, ok, message, fix in found]


def _another_file() -> str:
    from dovetail.config import env_name

    return f"or let {env_name('db')} name a file elsewhere"
