"""The registry of this process: the handlers that come with Dovetail, and then everybody else's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dovetail.handlers.external import call_external_service
from dovetail.handlers.input_output import fail, give_input, give_output, sleep
from dovetail.handlers.llm import llm_service
from dovetail.handlers.registry import BUILT_IN, Registry, describe

if TYPE_CHECKING:
    from dovetail.config import Settings

# A service that did not answer is worth asking again; what happens in this process is not.
REMOTE_RETRIES = 3


SECRET_FIELDS = {"call_external_service": ("headers", "params", "json", "body")}
"""Never the url: it is logged by every server on the way, and decides where a secret goes."""


def builtin_registry(settings: Settings) -> Registry:
    """The handlers of the contract, and nothing else."""
    registry = Registry()
    for name, fn, retries, aliases in (
        ("input", give_input, 0, ()),
        ("output", give_output, 0, ()),
        ("call_external_service", call_external_service(settings), REMOTE_RETRIES, ()),
        ("llm_service", llm_service(settings), REMOTE_RETRIES, ("llm_generate",)),
        ("sleep", sleep, 0, ()),
        ("fail", fail, 0, ()),
    ):
        secrets = SECRET_FIELDS.get(name, False)
        known = describe(fn, name=name, max_retries=retries, origin=BUILT_IN, secrets=secrets)
        registry.add(known, *aliases)
    return registry


def load_registry(settings: Settings, specs: Iterable[str] = ()) -> Registry:
    """Built-in handlers, installed packages', those of `DOVETAIL_HANDLERS`, and of `--handlers`."""
    registry = builtin_registry(settings)
    registry.load_entry_points()
    for spec in (*settings.handlers, *specs):
        registry.load(spec)
    return registry
