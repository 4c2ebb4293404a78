"""A package of an extra that is not installed is named with the extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.celery import PACKAGES, imports_of


@pytest.mark.parametrize("missing", ["celery", "kombu"])
def test_importing_dovetail_celery_without_its_extra_names_the_extra(
    tmp_path: Path, missing: str
) -> None:
    broken = f"raise ModuleNotFoundError(\"No module named '{missing}'\", name='{missing}')"
    (tmp_path / f"{missing}.py").write_text(broken)
    done = subprocess.run(
        [sys.executable, "-c", "import dovetail.celery"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: dovetail.celery needs '{missing}', which is not installed: "
        "pip install 'dovetail[celery]'"
    )


@pytest.mark.parametrize("package", [one for packages in PACKAGES.values() for one in packages])
def test_a_missing_package_is_named_with_its_extra(package: str) -> None:
    with (
        pytest.raises(ModuleNotFoundError, match=r"pip install 'dovetail\[x\]'"),
        imports_of("m", "x"),
    ):
        raise ModuleNotFoundError("no", name=f"{package}.part")


def test_an_import_error_of_the_user_is_not_reported_as_a_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^no$"), imports_of("m", "x"):
        raise ModuleNotFoundError("no", name="my_typo")
