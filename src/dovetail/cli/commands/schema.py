"""`dovetail schema`: the definition's JSON Schema."""

from __future__ import annotations

import json

from dovetail.cli.output import say
from dovetail.core.definition.model import definition_schema


def print_schema() -> None:
    # ASCII, so that a redirect gives the same file whatever the locale is.
    say(json.dumps(definition_schema(), indent=2))
