"""A package of an extra that is not installed is named with the extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def import_error(tmp_path: Path, module: str, missing: str) -> str:
    """The last line of `import dovetail.celery` if `module` cannot import `missing`."""
    broken = f"raise ModuleNotFoundError(\"No module named '{missing}'\", name='{missing}')"
    (tmp_path / f"{module}.py").write_text(broken)
    done = subprocess.run(
        [sys.executable, "-c", "import dovetail.celery"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "missing", ["celery", "kombu", "billiard", "vine", "amqp", "redis", "hiredis.part"]
)
def test_importing_dovetail_celery_without_its_extra_names_the_extra(
    tmp_path: Path, missing: str
) -> None:
    package = missing.partition(".")[0]
    assert import_error(tmp_path, "celery", missing) == (
        f"ModuleNotFoundError: dovetail.celery needs '{package}', which is not installed: "
        "pip install 'dovetail[celery]'"
    )


def test_an_import_error_of_the_user_is_not_reported_as_a_missing_extra(tmp_path: Path) -> None:
    line = import_error(tmp_path, "celery", "my_typo")
    assert line == "ModuleNotFoundError: No module named 'my_typo'"
