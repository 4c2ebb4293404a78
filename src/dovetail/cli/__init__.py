"""The command line: parses, calls one function of the engine, prints.

Importing it costs nothing; each command loads what it needs when it is called, so that
`dovetail --help` is there at once.
"""

from __future__ import annotations


def main() -> None:
    """The `dovetail` command."""
    from dovetail.cli.output import exit_code_of, prepare_streams

    prepare_streams()

    def command() -> None:
        from dovetail.cli.app import app

        app()

    raise SystemExit(exit_code_of(command))
