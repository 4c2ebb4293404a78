"""What the processes of the fault tests do: each is a `dovetail` of the forker.

Everything that a service imports is imported here, once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from dovetail.api import app as api_app
from dovetail.api import operations, server
from dovetail.cli import app, main
from dovetail.cli import services as cli_services
from dovetail.cli.commands import services
from dovetail.wiring import distributed

PRELOADED = [api_app, app, cli_services, distributed, operations, server, services]


def dovetail(folder: str, args: list[str], env: dict[str, str]) -> None:
    """`dovetail ARGS` in this folder, until the test ends it."""
    signal.alarm(0)
    _end_with_parent()
    os.chdir(folder)
    os.environ.update(env)
    sys.argv = ["dovetail", *args]
    main()


def _end_with_parent() -> None:
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
