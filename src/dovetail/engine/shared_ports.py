"""What an orchestrator of many needs of those around it, who all see the same.

What it must not know: who they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from dovetail.core.events import Event, Token
from dovetail.core.transitions import Decision, Submit, Wake
from dovetail.engine.lines import Lines
from dovetail.engine.ports import Store, Task

Start = tuple[str, str, Token]


class Agenda(Lines, Protocol):
    """What is due when, over all runs."""

    async def delay(self, wakes: Iterable[tuple[float, Wake]]) -> None: ...
    async def due(self, now: float, limit: int) -> list[tuple[float, Wake]]: ...
    async def next_due(self) -> float | None: ...
    async def woken(self, due: Iterable[tuple[float, Wake]]) -> None:
        """These are done; but one that has another time by now waits anew, and goes on waiting."""
        ...

    async def lease(self, run_ids: Iterable[str], until: float) -> None:
        """Look at these runs then, or earlier if somebody else is to be missed earlier."""
        ...

    async def expired(self, now: float, limit: int) -> list[str]:
        """Runs to look at: somebody in them may have been silent for longer than its lease.

        Answers no sooner than a lease can be renewed."""
        ...

    async def put_off(self, run_ids: Iterable[str], mark: float) -> None:
        """Look at these no earlier than then, but for a `lease` that comes from now on."""
        ...

    async def released(self, run_ids: Iterable[str], mark: float) -> None:
        """Nobody is to be missed in these, unless there was a `lease` since they were put off."""
        ...

    async def moved(self, run_ids: Iterable[str], now: float, *, is_new: bool = False) -> None:
        """`is_new`: they are about to be made. One that is there already may be there because its
        maker died over it, and has not moved."""
        ...

    async def idle(self, since: float, limit: int) -> list[tuple[str, float]]: ...
    async def ended(self, run_ids: Iterable[str], since: float) -> None:
        """Neither moves nor leases are to be expected of these, unless one has moved since."""
        ...

    async def remember_all(self, now: float) -> None: ...
    async def age(self) -> float:
        """For how many seconds it has been there without a break, at least."""
        ...


class Traffic(Protocol):
    """What lies about between the processes."""

    async def oldest_result(self) -> float | None:
        """When the oldest result that is not taken in yet was sent."""
        ...

    async def oldest_waiting(self, handler: str) -> float | None:
        """When the oldest task of a handler that no worker has got yet was sent."""
        ...

    async def lost(self) -> list[str]:
        """Handlers whose waiting tasks were all lost since this was last asked."""
        ...

    async def announce(self, run_ids: Iterable[str]) -> None:
        """Tell who waits for the end of these runs."""
        ...


class Notices(Protocol):
    """Who else must know that runs have moved."""

    every_move: bool
    """Not only that their status is another."""

    async def moved(
        self,
        run_ids: Sequence[str],
        turned: Sequence[str],
        ended: Mapping[str, Event | None] | None = None,
    ) -> None:
        """These have new events; of `turned` the status is another, or they are new. Those that
        `ended` just now are told with their last event, if that is known.

        Told before such a run leaves the agenda: if the teller dies, the sweep tells it again.
        """
        ...

    async def begun(self, submits: Sequence[Submit], created_at: float) -> None:
        """These are new."""
        ...


class SharedStore(Store, Protocol):
    @property
    def breaks(self) -> int:
        """How often the connection to it broke: what was asked then may have been done before it
        was asked again, and was refused."""
        ...

    async def create_many(self, submits: Sequence[Submit], now: float) -> list[Decision]:
        """Make these runs, each by itself; nothing is decided of one that is there."""
        ...

    async def offered(self, tasks: Sequence[Task]) -> list[bool]:
        """Which of these starts anybody may still claim."""
        ...

    async def claim(
        self, tasks: Sequence[Task], worker: str, until: float, now: float
    ) -> list[bool]:
        """Which of these starts are this worker's from now on; see `Claim`."""
        ...

    async def running(self, run_ids: Sequence[str]) -> list[tuple[Start, float]]:
        """What is somebody's in these runs, and until when."""
        ...

    def made_at(self, run_id: str) -> float | None:
        """When this run was made, if that is known without looking."""
        ...

    async def look_up(self, run_ids: Iterable[str]) -> None:
        """Get to know these in one go, for who will apply something to each of them."""
        ...

    async def sent(self) -> None:
        """Returns when whatever it has sent out by itself has arrived."""
        ...

    async def settle_pending(self, run_id: str, now: float) -> Decision:
        """Decide on conditions that somebody left undecided."""
        ...
