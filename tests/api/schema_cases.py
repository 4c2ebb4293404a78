"""The server held against its own OpenAPI document, by Schemathesis: cases by the hundred.

It makes requests that fit the document and requests that do not, and looks at every answer: no
5xx, no status, header, content type or body that the document does not have, nothing accepted
that violates it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SCHEMATHESIS = str(Path(sys.executable).with_name("schemathesis"))

# What is not held against the server, and why.
CONFIG = """
# A schema cannot say that a template reads only ancestors, that ids are unique, or that a run
# must have ended before it is retried.
[checks.positive_data_acceptance]
enabled = false

# A body beyond its bound is refused with 413 before it is read. Schemathesis does not know 413 as
# a refusal.
[checks.negative_data_rejection]
expected-statuses = [
  "400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx",
]

# Its very purpose is to answer 200 and tell what is wrong with the body.
[[operations]]
include-name = "POST /api/v1/workflows/validate"
[operations.checks.negative_data_rejection]
enabled = false
# A workflow may be called `validate`: then GET and DELETE are for that one.
[operations.checks.allow_header_conformance]
enabled = false

# A stream without an end: Schemathesis would wait for the rest of it.
[[operations]]
include-name = "GET /api/v1/events"
enabled = false

# As for `validate`: GET and DELETE are for a run with this id.
[[operations]]
include-name = ["POST /api/v1/runs/retry", "POST /api/v1/runs/cancel"]
[operations.checks.allow_header_conformance]
enabled = false
"""


class Outcome(NamedTuple):
    cases: int
    passed: bool
    reported: str


def run_cases(
    url: str, folder: Path, *, seed: int, examples: int, phases: str, seconds: float
) -> Outcome:
    """So many examples of each call, the same ones for the same seed."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [SCHEMATHESIS, "--config-file", str(config), "run", f"{url}/openapi.json"]
    command += ["--phases", phases, "--max-examples", str(examples), "--seed", str(seed)]
    command += ["--continue-on-failure", "--generation-database", "none", "--no-color"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    reported = done.stdout + done.stderr
    count = re.search(r"([\d,]+) generated", reported)
    cases = int(count[1].replace(",", "")) if count else 0
    return Outcome(cases, done.returncode == 0, reported)
