"""`dovetail graph`: a workflow drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from dovetail.cli import output as streams
from dovetail.cli.drawing import Picture, draw_dot, draw_mermaid, draw_svg, draw_words, picture_of
from dovetail.cli.failures import INVALID
from dovetail.cli.files import File, checked_file, report_of
from dovetail.cli.text import Line
from dovetail.config import load_settings
from dovetail.handlers.builtin import load_registry
from dovetail.wiring.embedded import definition_limits

_DRAW: dict[str, Callable[[Picture], Iterable[Line | str]]] = {
    "text": draw_words,
    "mermaid": draw_mermaid,
    "dot": draw_dot,
    "svg": draw_svg,
}


def draw_file(
    path: str, form: Literal["text", "mermaid", "dot", "svg"], handlers: Sequence[str] = ()
) -> int:
    settings = load_settings()
    limits = definition_limits(settings)
    file = File(path, limits)
    # Whose handlers are known elsewhere can be drawn here all the same; those that are given must
    # be all that it needs, as for `validate` and `run`.
    checked = checked_file(file, limits, load_registry(settings, handlers) if handlers else None)
    if checked.workflow is None:
        for line in report_of(file, checked):
            streams.complain(line)
        return INVALID
    for drawn in _DRAW[form](picture_of(checked.workflow)):
        streams.say(drawn)
    return 0
