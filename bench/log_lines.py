"""What a line of a handler's log costs its worker: CPU in µs, by the way it is written.

    .venv/bin/python bench/log_lines.py [LINES]

One attempt writes the lines into its log, which keeps what `DOVETAIL_NODE_LOG_BYTES` allows. The
console is closed, so that only the capture is measured.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from contextvars import copy_context

import structlog

from dovetail.core.redaction import Redactor
from dovetail.handlers.context import Context
from dovetail.handlers.log_capture import CURRENT, LogRules, capturing

SECRETS = {f"KEY_{n}": f"s3cret-value-number-{n}" for n in range(5)}


def cpu_per_line(write: Callable[[int], None], lines: int, secrets: dict[str, str]) -> float:
    """In µs."""
    rules = LogRules()
    context = Context(
        run_id="r",
        node_id="n",
        redactor=Redactor(secrets),
        log_rules=rules,
        on_lines=lambda _: None,
    )

    def handler() -> None:
        CURRENT.set(context)
        for number in range(lines):
            write(number)

    with redirect_stdout(io.StringIO()), capturing(rules):
        began = time.process_time()
        copy_context().run(handler)
        return (time.process_time() - began) / lines * 1e6


def main() -> None:
    lines = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    logging.getLogger().addHandler(logging.NullHandler())
    event_logger = structlog.wrap_logger(structlog.PrintLogger(file=io.StringIO()))
    ways: dict[str, Callable[[int], None]] = {
        "logging": lambda n: logging.info("page %d of %d", n, lines),
        "print": lambda n: print("page", n, "of", lines),
        "structlog": lambda n: event_logger.info("page", number=n, of=lines),
    }
    for name, write in ways.items():
        without, with_secrets = (
            min(cpu_per_line(write, lines, secrets) for _ in range(3)) for secrets in ({}, SECRETS)
        )
        print(f"{name:10} {without:6.1f} µs a line, {with_secrets:6.1f} with 5 secrets to redact")


if __name__ == "__main__":
    main()
