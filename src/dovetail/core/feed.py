"""The feed: the run events of all runs of a store, in one order, each with an id to resume after.

A store keeps the newest events of its feed. A reader that resumes gets every event after its id, or
is refused with `Expired` if one of them may be gone.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dovetail.core.errors import Expired, InvalidParams, Problem, shown
from dovetail.core.events import Event

KEPT_SECONDS = 86400.0
MAX_KEPT_EVENTS = 100_000
"""Events that are older, or beyond so many newer ones, leave the feed."""
_POSITION = re.compile(r"([0-9a-f]{8})((?:-[0-9]{1,18}){1,2})")


class FeedPosition(NamedTuple):
    """A place in a feed: after one event, before the next. As text it is the id of that event."""

    feed: str
    """Names the feed: a store that was emptied or replaced has another one."""
    number: tuple[int, ...]

    def __str__(self) -> str:
        return "-".join((self.feed, *map(str, self.number)))

    @classmethod
    def parse(cls, text: str) -> FeedPosition:
        """Raises `InvalidParams`."""
        found = _POSITION.fullmatch(text)
        if found is None:
            message = f"{shown(text)} is no id of the feed; use the `id` of an event as it came"
            raise InvalidParams([Problem("invalid_field", message, "after")])
        name, numbers = found.groups()
        return cls(name, tuple(map(int, numbers[1:].split("-"))))


class FeedEntry(NamedTuple):
    position: FeedPosition
    run_id: str
    workflow: str
    event: Event


def check_position(after: FeedPosition, dropped: FeedPosition, newest: FeedPosition) -> None:
    """Raises `Expired` unless the feed has every event after that position.

    `dropped` is the last event that has left the feed, `newest` the last event of all.
    """
    if after.feed != newest.feed or len(after.number) != len(newest.number):
        why = "it is of another store, or of one that was emptied since"
    elif after.number < dropped.number:
        why = "events after it are not kept any more"
    elif after.number > newest.number:
        why = "the store has lost the events before it"
    else:
        return
    raise Expired(
        f"the feed cannot be resumed after {shown(str(after))}: {why}. Read the runs anew and "
        "follow the feed without an id"
    )
