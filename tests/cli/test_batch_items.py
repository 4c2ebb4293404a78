"""The items of a batch: every bad line is reported before anything is made of the good ones."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from dovetail.cli.batching import MAX_PROBLEMS, Items
from dovetail.cli.commands.batches import _key
from dovetail.cli.output import InvalidInput
from dovetail.cli.run_pool import BatchCounts
from dovetail.cli.text import bare
from dovetail.core.definition.model import Workflow
from dovetail.core.definition.validation import DefinitionLimits

SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


def items(path: Path, text: str | bytes, *, max_bytes: int = 1000) -> Items:
    file = path / "items.jsonl"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return Items(str(file), SCHEMA, DefinitionLimits(max_body_bytes=max_bytes))


def problems(found: Items) -> list[str]:
    return [line.partition("items.jsonl:")[2] for line in found.check_all().problems]


def test_each_line_is_one_item_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    found = items(tmp_path, '\ufeff{"n": 1}\n\n  \r\n{"n": 2}\r\n{"n": 3}')
    assert found.check_all().count == 3
    assert [(item.number, item.line, item.params["n"]) for item in found] == [
        (0, 1, 1),
        (1, 4, 2),
        (2, 5, 3),
    ]


def test_every_kind_of_bad_line_is_reported_with_its_number(tmp_path: Path) -> None:
    lines = ['{"n": 1}', "{n: 1}", "[1]", '{"m": 1}', '{"n": "x"}', '{"n": NaN}', "\x1b[31m"]
    reported = problems(items(tmp_path, "\n".join(lines)))
    assert [line.partition(":")[0] for line in reported] == ["2", "3", "4", "5", "6", "7"]
    assert reported[0].startswith("2: not valid JSON: ")
    assert reported[1] == '3: an item is an object with params, as in {"topic": 1}, not [1]'
    assert reported[2] == "4: params.n: 'n' is required"
    assert reported[3] == "5: params.n: must be a whole number, not 'x'"
    assert "\x1b" not in "".join(reported)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("99999999999999999999", "99999999999999999999 does not fit into 64 bits"),
        ('1, "n": 2', "key 'n' appears twice in one mapping"),
        (r'"\u0000"', "a NUL character cannot be stored"),
        (r'"\ud800"', "a lone surrogate is no valid text"),
        ("[" * 40 + "]" * 40, "nested deeper than 32 levels"),
        ("1e999", "numbers are finite"),
    ],
)
def test_a_line_may_not_contain_values_that_a_params_file_may_not(
    tmp_path: Path, value: str, said: str
) -> None:
    (reported,) = problems(items(tmp_path, f'{{"n": 1}}\n{{"n": {value}}}\n'))
    assert reported.startswith("2: ")
    assert said in reported


def test_the_first_problems_are_reported_and_the_others_counted(tmp_path: Path) -> None:
    summary = items(tmp_path, "x\n" * 500).check_all()
    assert len(summary.problems) == MAX_PROBLEMS
    assert summary.bad_lines == summary.count == 500


def test_an_endless_line_is_not_read_into_memory(tmp_path: Path) -> None:
    found = items(tmp_path, b'{"n": 1}\n' + b" " * 5000, max_bytes=1000)
    with pytest.raises(InvalidInput, match=r"items\.jsonl:2: has more than 1,000 bytes"):
        found.check_all()


def test_the_digest_differs_for_different_contents(tmp_path: Path) -> None:
    one = items(tmp_path, '{"n": 1}\n').check_all().digest
    assert items(tmp_path, '{"n": 1}\n').check_all().digest == one
    assert items(tmp_path, '{"n": 2}\n').check_all().digest != one


def test_a_file_that_changes_during_the_batch_is_noticed(tmp_path: Path) -> None:
    found = items(tmp_path, '{"n": 1}\n{"n": 2}\n')
    found.check_all()
    rest = iter(found)
    items(tmp_path, '{"n": 1}\n[]\n')
    with pytest.raises(InvalidInput, match=r"items\.jsonl:2: was changed while the batch ran"):
        list(rest)


@pytest.mark.parametrize("name", ["-", "missing.jsonl", ".", "pipe"])
def test_an_input_that_cannot_be_read_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(InvalidInput):
        Items(name, None, DefinitionLimits())


def test_many_lines_take_the_memory_of_one(tmp_path: Path) -> None:
    line = json.dumps({"n": 1, "text": "x" * 500}) + "\n"
    (tmp_path / "items.jsonl").write_text(line * 20_000)
    found = Items(str(tmp_path / "items.jsonl"), None, DefinitionLimits())
    tracemalloc.start()
    assert found.check_all().count == sum(1 for _ in found) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


# --- how far it is ------------------------------------------------------------------------------


def test_the_counts_show_progress_speed_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    tally = BatchCounts(1000)
    for _ in range(100):
        tally.add("COMPLETED", before=True)
    assert bare(tally.line()) == "100 of 1,000 done"
    now[0] = 2.0
    for _ in range(98):
        tally.add("COMPLETED")
    tally.add("FAILED")
    tally.add("CANCELLED")
    assert bare(tally.line()) == "200 of 1,000 done, 1 failed, 1 cancelled, 50/s, about 16s left"
    assert bare(tally.picture()[0]).startswith("━" * 30 + "  200 of")
    assert tally.summary() == "1 cancelled, 198 completed, 1 failed"


@pytest.mark.parametrize(("ended", "said"), [(30, "3.0/s"), (6, "0.6/s"), (5, "3.0/min")])
def test_a_slow_speed_is_shown_in_a_readable_unit(
    monkeypatch: pytest.MonkeyPatch, ended: int, said: str
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    tally = BatchCounts(1000)
    now[0] = 100.0 if ended == 5 else 10.0
    for _ in range(ended):
        tally.add("COMPLETED")
    assert f", {said}, about " in bare(tally.line())


def test_counts_before_the_first_end_say_none_done() -> None:
    assert BatchCounts(3).summary() == "none done"


def test_the_key_of_a_batch_is_that_of_earlier_versions() -> None:
    flow = {"name": "w", "nodes": [{"id": "a", "handler": "input"}]}
    summary = SimpleNamespace(digest="d")
    key = _key(Workflow.model_validate(flow), summary)  # type: ignore[arg-type]
    assert key == "batch-ba8bbecb68d60c6a5b42833175935a69552812cef3cac2f375f5294f648af887"
    flow["nodes"][0]["allow_failure"] = True  # type: ignore[index]
    assert _key(Workflow.model_validate(flow), summary) != key  # type: ignore[arg-type]
