"""`dovetail handlers`: the handlers known here; on services, the handlers of their workers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.cli import output as streams
from dovetail.cli.options import AsJson, Handlers, declarations, on_target
from dovetail.cli.output import document_if, headed, json_bytes, print_lines
from dovetail.cli.target import is_shared, target_settings
from dovetail.cli.text import Line, cells, clip, listed, plain
from dovetail.core.errors import DovetailError

if TYPE_CHECKING:
    from dovetail.config import Settings
    from dovetail.core.definition.editor_schema import EditorHandler
    from dovetail.handlers.registry import Handler, Registry

_INDENT = "    "
MAX_WORKERS = 5
"""So many workers of a handler are named."""

app = declarations()


@app.command()
@on_target
def handlers(handlers: Handlers = None, as_json: AsJson = False) -> None:
    """List the handlers known here: origin, retries, version and config.

    On Redis or a server: the handlers that workers have announced, and which workers.
    """
    from dovetail.config import load_settings
    from dovetail.handlers.builtin import load_registry

    settings = target_settings()
    if is_shared(settings) and not handlers:
        _list_announced(settings, as_json=as_json)
        return
    with document_if(as_json) as write:
        registry = load_registry(load_settings(), handlers or ())
        known = registry.handlers()
        if write is not None:
            write(json_bytes([_described(handler, registry) for handler in known]))
            return
    names = {handler.name: _names(handler, registry) for handler in known}
    width = max(map(len, names.values()))
    origins = max(cells(plain(handler.origin)) for handler in known)
    for handler in known:
        origin = plain(handler.origin)
        retries = f"{handler.max_retries} {'retry' if handler.max_retries == 1 else 'retries'}"
        streams.say(
            [
                (names[handler.name].ljust(width), "bold"),
                (f"  {origin}{' ' * (origins - cells(origin))}", "dim"),
                (f"  {retries}" if handler.max_retries else "  no retries", ""),
                (f"  version {handler.version}" if handler.version != 1 else "", ""),
            ]
        )
        room = streams.width() - len(_INDENT)
        if handler.description:
            streams.say(_INDENT + clip(plain(handler.description), room))
        for line in textwrap.wrap(
            _fields(_schema(handler)), max(20, room), subsequent_indent=" " * 8
        ):
            streams.say([(_INDENT + line, "dim")])
        if secrets := _secrets(handler):
            streams.say([(_INDENT + secrets, "dim")])


def _list_announced(settings: Settings, *, as_json: bool) -> None:
    """On services, the handlers of workers count, not the handlers of this machine."""
    import asyncio

    with document_if(as_json) as write:
        found = asyncio.run(_announced(settings))
        if write is not None:
            write(json_bytes(found))
            return
    print_lines(_announced_lines(found))


def _announced_lines(found: list[dict[str, Any]]) -> Iterator[Line | str]:
    if not found:
        yield "no worker has announced a handler; start one:  dovetail worker"
        return
    rows = headed(("HANDLER", "RETRIES", "VERSION", "WORKERS"), map(_announced_row, found))
    for row, known in zip(rows, [{}, *found], strict=True):
        yield row
        if schema := known.get("config_schema"):
            yield [(f"{_INDENT}{_fields(schema)}", "dim")]
        if where := known.get("secrets"):
            words = "anywhere in its config" if where is True else f"in {', '.join(where)}"
            yield [(f"{_INDENT}secrets: {plain(words)}", "dim")]


def _announced_row(one: dict[str, Any]) -> Line:
    workers = listed([plain(worker) for worker in one["workers"]], MAX_WORKERS)
    return [
        (plain(one["name"]), "bold"),
        (_known(one["max_retries"]), ""),
        (_known(one["version"]), ""),
        (workers, "") if workers else ("none that is alive", "wait"),
    ]


def _known(value: int | None) -> str:
    return "–" if value is None else str(value)


async def _announced(settings: Settings) -> list[dict[str, Any]]:
    if settings.server is None:
        from dovetail.wiring.health import announced_handlers

        return await announced_handlers(settings)
    from dovetail.client import http_client

    with http_client():
        from dovetail.client.connection import ServerConnection
    async with ServerConnection(settings.server, settings.token) as server:
        workers = (await server.call("GET", "/api/v1/workers"))["items"]
    known: dict[str, dict[str, Any]] = {}
    serving: dict[str, list[str]] = {}
    unknown = dict.fromkeys(("max_retries", "secrets", "version", "config_schema"))
    for worker in workers:  # the worker that was started last comes last, and counts
        for name in worker["handlers"]:
            known.setdefault(name, {"name": name, **unknown})
            serving.setdefault(name, [])
            if worker["alive"]:
                serving[name].append(worker["worker_id"])
        for details in worker.get("handler_details", ()):  # older servers do not have them
            known[details["name"]] = {**unknown, **details}
    return [{**known[name], "workers": serving[name]} for name in sorted(serving)]


def local_editor_handlers(registry: Registry) -> list[EditorHandler]:
    """The handlers of a registry, for the editor's schema."""
    from dovetail.core.definition.editor_schema import EditorHandler

    return [
        EditorHandler(name, known.description, known.checkable_schema())
        for name, known in registry.items()
    ]


def editor_handlers(specs: Sequence[str]) -> list[EditorHandler]:
    """The handlers known here and, on services, those of their workers, for the editor's schema."""
    import asyncio

    from dovetail.core.definition.editor_schema import EditorHandler
    from dovetail.handlers.builtin import load_registry

    settings = target_settings()
    registry = load_registry(settings, specs)
    found = {one.name: one for one in local_editor_handlers(registry)}
    if is_shared(settings):
        try:
            announced = asyncio.run(_announced(settings))
        except DovetailError as error:
            announced = []
            message = f"handlers that workers announced are not known here: {plain(str(error))}"
            streams.complain([(message, "dim")])
        for one in announced:
            name = one["name"]
            found.setdefault(name, EditorHandler(name, config=one.get("config_schema")))
    return list(found.values())


def _names(handler: Handler, registry: Registry) -> str:
    aliases = _aliases(handler, registry)
    return f"{handler.name} (or {', '.join(aliases)})" if aliases else handler.name


def _aliases(handler: Handler, registry: Registry) -> list[str]:
    return [alias for alias, name in registry.aliases().items() if name == handler.name]


def _fields(schema: Mapping[str, Any] | None) -> str:
    """`config: url*, method`, the required ones with a star; none if it takes any."""
    if schema is None:
        return "config: any"
    required = schema.get("required", ())
    names = [f"{plain(name)}{'*' * (name in required)}" for name in schema.get("properties", {})]
    return f"config: {', '.join(names) or 'none'}"


def _secrets(handler: Handler) -> str:
    """Where its config may have secrets, if anywhere."""
    if isinstance(handler.secrets, bool):
        return "secrets: anywhere in its config" if handler.secrets else ""
    return f"secrets: in {plain(', '.join(sorted(handler.secrets)))}"


def _schema(handler: Handler) -> dict[str, Any] | None:
    try:
        return handler.config_schema()
    except Exception:  # a user's model may hold what JSON Schema cannot say
        return None


def _described(handler: Handler, registry: Registry) -> dict[str, Any]:
    return {
        **handler.announcement(),
        "aliases": _aliases(handler, registry),
        "origin": handler.origin,
        "description": handler.description,
        "config_schema": _schema(handler),
    }
