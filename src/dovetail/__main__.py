"""`python -m dovetail`, if the script is not on the path."""

from __future__ import annotations

from dovetail.cli import main

if __name__ == "__main__":
    main()
