"""`dovetail handlers`: what a node's `handler` may name here."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from dovetail.cli import streams
from dovetail.cli.json_output import json_bytes
from dovetail.cli.text import cells, clip, plain
from dovetail.config import load_settings
from dovetail.handlers.builtin import load_registry
from dovetail.handlers.registry import Handler, Registry

_INDENT = "    "


def list_handlers(specs: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        with streams.document() as write:
            registry = load_registry(load_settings(), specs)
            found = [_described(known, registry) for known in registry.handlers()]
            write(json_bytes(found))
        return
    registry = load_registry(load_settings(), specs)
    known = registry.handlers()
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
        for line in textwrap.wrap(_fields(handler), max(20, room), subsequent_indent=" " * 8):
            streams.say([(_INDENT + line, "dim")])
        if secrets := _secrets(handler):
            streams.say([(_INDENT + secrets, "dim")])


def _names(handler: Handler, registry: Registry) -> str:
    aliases = _aliases(handler, registry)
    return f"{handler.name} (or {', '.join(aliases)})" if aliases else handler.name


def _aliases(handler: Handler, registry: Registry) -> list[str]:
    return [alias for alias, name in registry.aliases().items() if name == handler.name]


def _fields(handler: Handler) -> str:
    """`config: url*, method`, the required ones with a star; none if it takes any."""
    schema = _schema(handler)
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
        "name": handler.name,
        "aliases": _aliases(handler, registry),
        "origin": handler.origin,
        "max_retries": handler.max_retries,
        "secrets": handler.secrets
        if isinstance(handler.secrets, bool)
        else sorted(handler.secrets),
        "version": handler.version,
        "description": handler.description,
        "config_schema": _schema(handler),
    }
