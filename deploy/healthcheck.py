"""Check that the service in this container is alive, by its API port or its metrics port.

Uses only the standard library, so that it works even if Dovetail is broken.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

API_PORT = 8700
SECONDS = 4.0


def lives(port: int) -> bool:
    # No proxy from the environment: the service is on this machine.
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
