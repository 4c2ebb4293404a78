"""Idempotency keys: a request as a scope and a digest that stores compare.

The digest is of the request as it was sent, never of its meaning at the time: an alias may name
another version tomorrow, and the same request is still the same.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal, NamedTuple

import orjson

from dovetail.core.errors import Conflict, InvalidParams, Problem
from dovetail.core.values import MAX_DEPTH, encode, is_json
from dovetail.engine.ports import Key, KeyUsed

MAX_KEY_LENGTH = 255
_MAX_REQUEST_BYTES = 1 << 30
"""How much may be asked for is bounded elsewhere; this is what memory is there for."""
_LEVELS_AROUND_PARAMS = 2
"""Levels of nesting: what is asked, and in a batch its items."""


class KeyedRequest(NamedTuple):
    """What is asked for, as it is asked."""

    what: Literal["run", "batch", "fork"]
    workflow: str | None
    """The name of a registered one; a definition that is not registered has none. Of a fork: the
    run that is forked."""
    version: int | str | None
    body: Any
    idempotency_key: str | None

    def key(self, definition: str | None) -> Key | None:
        """The key to be kept, if there is one; `definition` is the digest of one that is not
        registered. Raises `InvalidParams` for a bad key, `NotJson` if what is asked is not JSON.
        """
        name = self.idempotency_key
        if name is None:
            return None
        check_key(name)
        asked = [self.workflow, definition, self.version, self.body]
        text = encode(
            asked, max_bytes=_MAX_REQUEST_BYTES, max_depth=MAX_DEPTH + _LEVELS_AROUND_PARAMS
        )
        ordered = orjson.dumps(orjson.loads(text), option=orjson.OPT_SORT_KEYS)
        scope = self.what if self.workflow is None else f"{self.what} of {self.workflow}"
        return scope, name, hashlib.sha256(ordered).hexdigest()

    def answer(self, known: KeyUsed) -> str:
        """The run or batch that was made of the same request. Raises `Conflict` for another."""
        if not known.same_body:
            key = self.idempotency_key
            raise Conflict(f"the idempotency key '{key}' was used before, for another request")
        return known.made


def check_key(name: str) -> None:
    """Raises `InvalidParams` for a text that cannot be an idempotency key."""
    if not 0 < len(name) <= MAX_KEY_LENGTH or not is_json(name):
        message = f"must be a text of 1 to {MAX_KEY_LENGTH} characters"
        raise InvalidParams([Problem("invalid_field", message, "idempotency_key")])


def is_for_a_batch(key: Key) -> bool:
    return key[0].partition(" ")[0] == "batch"
