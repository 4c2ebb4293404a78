"""Draws docs/states.md from the tables of states, so that the page cannot say anything else.

`python tools/states_diagram.py` writes it; a test compares.
Why a node moves is said here in a few words per move, and a move without words fails.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from dovetail.core.states import ALLOWED, ALLOWED_RUN, NodeStatus, RunStatus

PAGE = Path(__file__).resolve().parents[1] / "docs" / "states.md"

N, R = NodeStatus, RunStatus
Words = dict[tuple[StrEnum, StrEnum], str]

NODE: Words = {
    (N.PENDING, N.QUEUED): "every parent is done, and one completed or was allowed to fail",
    (N.PENDING, N.SKIPPED): "condition false, all parents skipped, or a parent failed (continue)",
    (N.PENDING, N.CANCELLED): "run cancelled, or failed elsewhere (fail_fast)",
    (N.PENDING, N.FAILED): "a parent failed (fail_fast), or the condition cannot be evaluated",
    (N.QUEUED, N.QUEUED): "published again: it was parked, backed off or held by max_concurrency",
    (N.QUEUED, N.RUNNING): "a worker claims it",
    (N.QUEUED, N.COMPLETED): "its output came from the node cache",
    (N.QUEUED, N.CANCELLED): "run cancelled, or failed elsewhere (fail_fast)",
    (N.QUEUED, N.FAILED): "its config cannot be rendered",
    (N.RUNNING, N.COMPLETED): "its handler returned",
    (N.RUNNING, N.FAILED): "its handler raised and no retry is left, or its worker was lost",
    (N.RUNNING, N.CANCELLED): "run cancelled",
    (N.RUNNING, N.QUEUED): "a retry after its backoff, or its worker was lost",
}
RUN: Words = {
    (R.PENDING, R.RUNNING): "its first nodes are queued",
    (R.PENDING, R.CANCELLED): "cancelled before it began",
    (R.RUNNING, R.COMPLETED): "every node COMPLETED, SKIPPED or allowed to fail",
    (
        R.RUNNING,
        R.FAILED,
    ): "a node FAILED (not allowed): at once (fail_fast), or at the end (continue)",
    (R.RUNNING, R.CANCELLED): "cancelled, and no node had failed (or it was allowed to)",
}

HEAD = """\
# States

Every transition of a node and of a run within one epoch. A retry of the run opens the next epoch:
the nodes that it resets begin again at PENDING, and the run at RUNNING. A node that a fork reuses
begins as COMPLETED.

`tools/states_diagram.py` writes this page from the tables in `src/dovetail/core/states.py`; a test
keeps it up to date.
"""


def diagram(title: str, table: dict[StrEnum, frozenset[StrEnum]], why: Words) -> str:
    lines = [f"## {title}", "", "```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(table))}"]
    for before, after in table.items():
        lines += [f"    {before} --> {to}" for to in sorted(after, key=list(table).index)]
        if not after:
            lines.append(f"    {before} --> [*]")
    lines += ["```", "", "| from | to | when |", "|---|---|---|"]
    for before, after in table.items():
        lines += [
            f"| {before} | {to} | {why[before, to]} |"
            for to in sorted(after, key=list(table).index)
        ]
        if not after:
            lines.append(f"| {before} | none | |")
    return "\n".join(lines) + "\n"


def page() -> str:
    node, run = diagram("A node", {**ALLOWED}, NODE), diagram("A run", {**ALLOWED_RUN}, RUN)
    return "\n".join((HEAD, node, run))


if __name__ == "__main__":
    PAGE.write_text(page())
