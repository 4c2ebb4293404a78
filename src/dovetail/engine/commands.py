"""What a user can ask for, each as one function that every edge calls.

The command line, the API and the client parse and print; what is allowed and what happens is
decided here and in the core.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.core.dag import build_graph
from dovetail.core.definition.params import apply_params
from dovetail.core.definition.source import Source
from dovetail.core.definition.validation import Checked, Limits, check
from dovetail.core.errors import InvalidDefinition
from dovetail.core.run import RunState
from dovetail.core.step import explain_refusal
from dovetail.core.transitions import Cancel, Retry, Submit
from dovetail.engine.orchestrator import Orchestrator
from dovetail.engine.ports import Store


@dataclass(frozen=True, slots=True)
class Commands:
    store: Store
    orchestrator: Orchestrator
    wait: Callable[[str], Awaitable[RunState]]
    """Returns the run once it has finished."""
    known_handlers: Container[str] | None
    default_retries: Mapping[str, int]
    limits: Limits

    def validate(self, definition: Source | Mapping[str, Any]) -> Checked:
        return check(definition, self.known_handlers, self.limits)

    async def trigger(
        self,
        definition: Source | Mapping[str, Any] | Checked,
        params: Mapping[str, Any] | None = None,
    ) -> str:
        """Run a definition; the run's id is returned once it cannot be lost any more.

        One that was checked already is not checked again. Raises `InvalidDefinition` or, for
        the params alone, `InvalidParams`.
        """
        checked = definition if isinstance(definition, Checked) else self.validate(definition)
        if checked.workflow is None:
            raise InvalidDefinition(checked.errors)
        given = apply_params(checked.workflow.params, params or {})
        graph = build_graph(checked.workflow, self.default_retries)
        run_id = new_run_id()
        await self.orchestrator.submit(Submit(run_id, graph, given))
        return run_id

    async def cancel(self, run_id: str) -> RunState:
        """Cancel what has not finished. Raises `NotFound`, or `Conflict` when nothing is left."""
        return await self._move(Cancel(run_id))

    async def retry(self, run_id: str, from_node: str | None = None) -> RunState:
        """Open a new epoch. Raises `NotFound` or `Conflict`."""
        return await self._move(Retry(run_id, from_node))

    async def _move(self, move: Cancel | Retry) -> RunState:
        run = await self.store.load(move.run_id)
        (decision,) = await self.orchestrator.apply([move], durable=True)
        if not decision:
            raise explain_refusal(run, move)
        return run


def new_run_id() -> str:
    """Random from the first digit on, so that six of them tell runs apart at a prompt."""
    return os.urandom(16).hex()
