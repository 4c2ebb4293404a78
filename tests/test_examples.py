"""Every example runs and ends as it says: the files of examples/, by the real command line.

The commands are the ones that the examples themselves name in their comments, so what a reader
copies is what is tested here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
BIN = Path(sys.executable).parent
FLOWS = sorted(path.relative_to(ROOT).as_posix() for path in EXAMPLES.rglob("*.yaml"))
HANDLERS = ["--handlers", "examples/handlers/text_tools.py"]


@dataclass(frozen=True)
class Expected:
    result: Any
    statuses: dict[str, str] = field(default_factory=dict)
    """Of the nodes that did not simply complete at their first attempt."""
    exit_code: int = 0
    status: str = "COMPLETED"


MOCK = "[mock] Summary of"

RUNS: dict[str, Expected] = {
    "dovetail run examples/quickstart.yaml": Expected(
        {
            "city": "Lisbon",
            "forecast_from": "mock://weather.example/lisbon",
            "days": 3,
            "sights": f"{MOCK} 5 words: Name three sights of Lisbon.",
            "tips": f"{MOCK} 17 words: What to pack for 3 days, seeing {MOCK} 5 words:…",
        }
    ),
    "dovetail run examples/quickstart.yaml -p city=Oslo -p tips=false": Expected(
        {
            "city": "Oslo",
            "forecast_from": "mock://weather.example/oslo",
            "days": 3,
            "sights": f"{MOCK} 5 words: Name three sights of Oslo.",
            "tips": "none asked for",
        },
        {"tips": "SKIPPED condition_false"},
    ),
    "dovetail run examples/fan_out_fan_in.yaml": Expected(
        {
            "period": "2026/Q3",
            "total": 525,
            "best": "east",
            "regions": [
                {"region": "north", "sales": 120},
                {"region": "south", "sales": 75},
                {"region": "east", "sales": 240},
                {"region": "west", "sales": 90},
            ],
        }
    ),
    "dovetail run examples/digest.yaml": Expected(
        {
            "articles": 3,
            "missing": 0,
            "digest": f"{MOCK} 30 words: One text of: {MOCK} 4 words: Summarise article 1: "
            "mock://news.example/1;…",
        }
    ),
    "dovetail run examples/conditional_routing.yaml": Expected(
        {"customer": "ada", "way": "approved at once", "answer": "nobody was asked"},
        {"review": "SKIPPED condition_false", "file_review": "SKIPPED dependency_skipped"},
    ),
    "dovetail run examples/conditional_routing.yaml -p amount=900": Expected(
        {
            "customer": "ada",
            "way": "reviewed",
            "answer": f"{MOCK} 8 words: May ada spend 900? Answer yes or no.",
        },
        {"approve": "SKIPPED condition_false"},
    ),
    "dovetail run examples/continue_on_failure.yaml": Expected(
        {
            "count_stock": {
                "text": f"{MOCK} 6 words: How many things are in mock://warehouse.example/stock?",
                "model": "mock",
                "usage": {"prompt_tokens": 6, "completion_tokens": 11, "total_tokens": 17},
                "mock": True,
            },
            "price_stock": {
                "text": f"{MOCK} 5 words: Price the stock at 1.0.",
                "model": "mock",
                "usage": {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15},
                "mock": True,
            },
            "invoice": None,
        },
        {
            "exchange_rate": "FAILED",
            "import_orders": "FAILED after 3 attempts",
            "match_orders": "SKIPPED dependency_failed import_orders",
            "invoice": "SKIPPED dependency_failed import_orders",
        },
        exit_code=1,
        status="FAILED",
    ),
    "dovetail run examples/llm_summary.yaml": Expected(
        {
            "headline": f"{MOCK} 26 words: A headline of at most six words for this: {MOCK}…",
            "summary": (
                f"{MOCK} 32 words: A dovetail is a joint that holds without glue or nails: tails…"
            ),
            "words_in": 38,
            "offline": True,
        }
    ),
    f"dovetail run examples/custom_handler.yaml {' '.join(HANDLERS)}": Expected(
        {
            "words": {"words": 11, "most_common": [["the", 4], ["and", 3]]},
            "publish": {"sent": 11, "attempt": 2, "key": "<run_id>:publish:1"},
        },
        {"publish": "COMPLETED after 2 attempts"},
    ),
}

SCRIPTS = {
    "python examples/library.py": """\
layers: [['extract'], ['save', 'review']]
ready after extract: ['save', 'review']
COMPLETED: 2 completed, 1 skipped
  extract: COMPLETED, 1 retry: {'text': 'document 7', 'confidence': 0.9}
  save: COMPLETED: 7.json: document 7
  review: SKIPPED: -
COMPLETED: 3 completed, 0 skipped
  extract: COMPLETED, 1 retry: {'text': 'document 8', 'confidence': 0.6}
  save: COMPLETED: 8.json: document 8
  review: COMPLETED: somebody looks at document 8
""",
    "python examples/embedded.py": """\
FAILED: the mail server is down
{'total': 'COMPLETED', 'mail': 'FAILED'}
COMPLETED: {'mail': 'sent'}, ['You owe us 70 coins.']
['run.retried', 'node.queued', 'node.started', 'node.completed', 'run.completed']
WorkflowVersion(name='invoice', version=1, created=True)
order 8: {'total': 80, 'mail': 'sent'}, once: True
batch: {'COMPLETED': 20}, 22 mails in all
[119, 118, 117]
""",
}

# With a worker at its side, which its comment names, and a Redis.
ON_CELERY = {
    "python examples/celery_dag.py": """\
one: COMPLETED, somebody looks at 8.json
group: {'COMPLETED': 4, 'FAILED': 1}
  1: 2 completed, 1 skipped
  2: 3 completed, 0 skipped
  3: 0 completed, 2 skipped
  4: 3 completed, 0 skipped
  5: 2 completed, 1 skipped
item 2 failed in 'extract': document 3 is empty
""",
}

DOCUMENTS = "dovetail documents process examples/documents"
PAGES = "dovetail documents process examples/long_invoice.pdf --pages"
FOUND = {
    "agreement.pdf": ("contract", None, True),
    "invoice.pdf": ("invoice", 621.36, True),
    "kassenbon.txt": ("receipt", 33.1, True),
    "receipt.html": ("receipt", 37.99, True),
    "rechnung.docx": ("invoice", 6164.2, True),
    "scribbled.txt": ("other", None, False),
}


def environment() -> dict[str, str]:
    """Without the settings of the user."""
    return {k: v for k, v in os.environ.items() if not k.startswith("DOVETAIL_")}


def call(command: str, *more: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """As typed in the checkout, without the runs of the user."""
    words = [*shlex.split(command), *more]
    with TemporaryDirectory() as folder:
        return subprocess.run(
            [BIN / words[0], *words[1:]],
            cwd=ROOT,
            env={**environment(), "DOVETAIL_DB": f"{folder}/runs.db", **settings},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.mark.parametrize("command", RUNS)
def test_an_example_ends_as_its_text_says(command: str) -> None:
    expected = RUNS[command]
    done = call(command, "--json")
    assert done.returncode == expected.exit_code, done.stderr
    run = json.loads(done.stdout.replace(json.loads(done.stdout)["run_id"], "<run_id>"))
    assert run["status"] == expected.status
    assert run["result"] == expected.result
    reported = {node["id"]: how_it_ended(node) for node in run["nodes"]}
    assert {name: how for name, how in reported.items() if how != "COMPLETED"} == expected.statuses


def how_it_ended(node: dict[str, Any]) -> str:
    words = [node["status"], node["reason"], node["cause"]]
    if node["attempt"] > 1:
        words.append(f"after {node['attempt']} attempts")
    return " ".join(word for word in words if word)


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_script_prints_the_shown_output(command: str) -> None:
    done = call(command)
    assert (done.returncode, done.stdout, done.stderr) == (0, SCRIPTS[command], "")


@pytest.mark.parametrize("command", ON_CELERY)
def test_a_script_with_a_worker_prints_the_shown_output(command: str, redis_url: str) -> None:
    text = (ROOT / command.split()[-1]).read_text()
    (line,) = re.findall(r"^celery .*", text, re.MULTILINE)
    words = shlex.split(line)
    settings = {"BROKER_URL": redis_url}
    with subprocess.Popen(
        [BIN / words[0], *words[1:], "--loglevel", "ERROR"], cwd=ROOT, env=environment() | settings
    ) as worker:
        try:
            done = call(command, **settings)
        finally:
            worker.terminate()
    assert (done.returncode, done.stdout, done.stderr) == (0, ON_CELERY[command], "")
    assert worker.returncode == 0


def test_the_documents_are_extracted_once_and_not_the_second_time(tmp_path: Path) -> None:
    settings = {"DOVETAIL_DOCUMENTS_OUT": str(tmp_path / "out")}
    for state in ("completed", "cached"):
        done = call(f"{DOCUMENTS} --json", **settings)
        assert done.returncode == 0, done.stderr
        reported = json.loads(done.stdout)["documents"]
        assert {one["state"] for one in reported} == {state}
        found = {
            Path(one["file_path"]).name: (one["type"], one["total"], one["confidence"] >= 0.8)
            for one in reported
        }
        assert found == FOUND


def test_the_long_invoice_is_extracted_page_by_page(tmp_path: Path) -> None:
    done = call(f"{PAGES} --json", DOVETAIL_DOCUMENTS_OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["documents"]
    shown = ("type", "vendor", "date", "currency", "total")
    facts = ["invoice", "Harbour Tools Ltd", "2026-03-04", "GBP", 1141.8]
    assert [found[name] for name in shown] == facts
    assert found["confidence"] > 0.9


def test_every_example_is_valid_and_gives_no_warning() -> None:
    done = call("dovetail validate", *FLOWS, *HANDLERS, "--json")
    assert done.returncode == 0, done.stdout
    checked = json.loads(done.stdout)
    assert [one["file"] for one in checked] == FLOWS
    assert all(one["valid"] and not one["errors"] + one["warnings"] for one in checked), checked


@pytest.mark.parametrize("flow", FLOWS)
def test_an_example_can_be_drawn(flow: str) -> None:
    done = call("dovetail graph", flow)
    assert done.returncode == 0, done.stderr
    for name in re.findall(r"^  - id: (\w+)", (ROOT / flow).read_text(), re.MULTILINE):
        assert name in done.stdout


def test_every_command_that_an_example_names_is_run_here() -> None:
    named = set()
    for path in sorted(EXAMPLES.rglob("*")):
        if path.suffix in (".yaml", ".py", ".md"):
            reported = r"(?:\./dev run|dovetail (?:run|documents)|python) [^\n`]*"
            named |= {command_of(line) for line in re.findall(reported, path.read_text())}
    assert named == {*RUNS, *SCRIPTS, *ON_CELERY, DOCUMENTS, PAGES}


def command_of(line: str) -> str:
    """The command at the start of a line; what is said about it stands behind two blanks."""
    words = re.split(r"\s{2,}", line.strip())[0].rstrip(".")
    if words == "./dev run":
        return DOCUMENTS
    return re.sub(r"^\./dev run ", "dovetail ", words)


def test_every_file_of_the_examples_is_used_here() -> None:
    used = {word for command in [*RUNS, *SCRIPTS, *ON_CELERY, PAGES] for word in command.split()}
    used |= {f"examples/documents/{name}" for name in FOUND}
    files = {p.relative_to(ROOT).as_posix() for p in EXAMPLES.rglob("*.*") if p.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert files - used == {"examples/README.md"}


def test_every_example_is_listed_in_their_readme() -> None:
    text = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.rglob("*.*"):
        if path.suffix in (".yaml", ".py"):
            assert f"]({path.relative_to(EXAMPLES).as_posix()})" in text
