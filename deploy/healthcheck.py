"""Whether the service in this container lives: the API on its port, the others on that for metrics.

Python's own library only, so that it says what it sees even if Dovetail is broken.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

API_PORT = 8700
SECONDS = 4.0


def lives(port: int) -> bool:
    # No proxy of the environment: this is the very machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health/live", timeout=SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def main() -> int:
    ports = [API_PORT, int(os.environ.get("DOVETAIL_METRICS_PORT") or API_PORT)]
    return 0 if any(map(lives, ports)) else 1


if __name__ == "__main__":
    sys.exit(main())
