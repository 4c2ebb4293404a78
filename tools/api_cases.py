"""`./dev cases`: thousands of requests made from the served OpenAPI document, over each set-up.

    ./dev cases                       every set-up, at least 3,000 cases each
    ./dev cases --setup redis         one of embedded, redis, archive
    ./dev cases --seed 7 --examples 100

It exits 1 if any answer is a 5xx or not what the document says.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.api.conftest import SETUPS  # noqa: E402
from tests.api.schema_cases import run_cases  # noqa: E402
from tests.log_text import without_attempts  # noqa: E402

FEWEST = 3000
PHASES = "examples,coverage,fuzzing,stateful"


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev cases", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--setup", choices=SETUPS, help="only this one")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--examples", type=int, default=40, help="of each call, beside the edges")
    args = parser.parse_args()
    wrong = 0
    for name in [args.setup] if args.setup else SETUPS:
        with tempfile.TemporaryDirectory(prefix="dovetail-cases-") as folder:
            served, client = Path(folder, "served"), Path(folder, "client")
            served.mkdir()
            client.mkdir()
            with SETUPS[name](served) as server:
                outcome = run_cases(
                    server.url,
                    client,
                    seed=args.seed,
                    examples=args.examples,
                    phases=PHASES,
                    seconds=3600,
                )
                log = server.log.read_text()
        enough = outcome.cases >= FEWEST
        verdict = "as the document says" if outcome.passed else "NOT as the document says"
        print(f"{name}: {outcome.cases:,} cases, seed {args.seed}: {verdict}", flush=True)
        if not outcome.passed or "Traceback" in without_attempts(log) or not enough:
            print(outcome.reported, log, sep="\n")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
