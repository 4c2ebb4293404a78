"""Days as people write them, and which of several is the day a document was issued.

It must not know what the document is.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

# fmt: off
_MONTHS = {
    name: number
    for number, names in enumerate((
        "january jan januar jänner janvier enero gennaio",
        "february feb februar février febrero febbraio",
        "march mar märz mär mrz mars marzo",
        "april apr avril abril aprile",
        "may mai mayo maggio",
        "june jun juni juin junio giugno",
        "july jul juli juillet julio luglio",
        "august aug août agosto",
        "september sep sept septembre septiembre settembre",
        "october oct oktober okt octobre octubre ottobre",
        "november nov novembre noviembre",
        "december dec dezember dez décembre diciembre dicembre",
    ), 1)
    for name in names.split()
}
# fmt: on
_NAME = "[a-zà-ÿA-ZÀ-Ý]{3,10}"  # any word: a look into the table is faster than sixty names
_FORMS = {
    # 2026-03-31, 2026/03/31, 2026.03.31
    "year first": re.compile(r"(?<![\d.,/-])((?:19|20)\d\d)([-/.])(\d{1,2})\2(\d{1,2})(?!\d)"),
    # 31.03.2026, 31/03/2026, 03/31/2026, 31-03-26
    "year last": re.compile(
        r"(?<![\d.,/-])(\d{1,2})([-/.])[ ]?(\d{1,2})\2[ ]?((?:19|20)?\d\d)(?![\d/-]|\.\d)"
    ),
    # 31 March 2026, 31. März 2026, 31st of March, 2026, 31-Mar-26
    "day, month": re.compile(
        rf"(?<!\d)(\d{{1,2}})(?:st|nd|rd|th|\.)?(?: of| de)?[ -]{{0,2}}({_NAME})"
        r"[.,]?(?: de)?[ -]{1,2}((?:19|20)?\d\d)(?!\d)"
    ),
    # March 31, 2026
    "month, day": re.compile(
        rf"(?<![a-zà-ÿA-ZÀ-Ý])({_NAME})\.?[ ]{{1,2}}(\d{{1,2}})(?:st|nd|rd|th)?,?[ ]{{1,2}}"
        r"((?:19|20)\d\d)(?!\d)"
    ),
}
_ISSUED = re.compile(
    r"invoice date|date of issue|issue date|issued|date of invoice|bill date|receipt date"
    r"|rechnungsdatum|belegdatum|ausgestellt|ausstellungsdatum|effective date|dated|vertragsdatum"
    r"|\bdate\b|\bdatum\b|\bdate de facture|\bfecha\b|\bvom\b|,\s?den\b"
)
_NOT_ISSUED = re.compile(
    r"due|fällig|zahlbar|deliver|liefer|leistung|ship|order date|bestell|service|period|zeitraum"
    r"|valid|gültig|expir|start|begin|birth|geburt|geboren|print|druck|until|\bbis\b|between"
    r"|appointment|termin|return|check-?(?:in|out)|\bpay"
)
BEFORE = 48
"""How many characters before a day are looked at for what it is the day of."""
MAX_DAYS = 100
AMBIGUOUS = 0.55
"""03/04/2026 is in March or in April, and only the writer knows."""


@dataclass(frozen=True, slots=True)
class Found:
    day: datetime.date
    sure: float
    start: int


def day_of(text: str, *, is_american: bool = False) -> tuple[str | None, float]:
    """The day of issue and how sure that is. `is_american`: the money is dollars."""
    month_first = _order(text)
    found = sorted(
        _all_days(text, is_american if month_first is None else month_first, month_first),
        key=lambda each: each.start,
    )
    lowered = text.lower()
    best: tuple[float, int, str] | None = None
    for rank, each in enumerate(found):
        before = _line_before(lowered, each.start)
        if _ISSUED.search(before) and not _NOT_ISSUED.search(before):
            score = 0.97
        elif _NOT_ISSUED.search(before):
            score = 0.35
        elif before.strip(" \t,.:;") == "" or each.start < 1500:
            score = 0.86 if rank == 0 else 0.78
        else:
            score = 0.6
        score = round(score * each.sure, 4)
        if best is None or score > best[0]:
            best = (score, each.start, each.day.isoformat())
    return (best[2], best[0]) if best else (None, 0.0)


def _line_before(text: str, start: int) -> str:
    """What stands before it on its line; where that is nothing, the line above."""
    before = text[max(0, start - BEFORE) : start]
    line = before.rpartition("\n")[2]
    if line.strip(" \t:"):
        return line
    above = before.rstrip().rpartition("\n")[2]
    # A label above is short; a sentence that happens to end there says nothing about this day.
    return above if len(above) <= 30 else ""


def _order(text: str) -> bool | None:
    """Whether the month comes first in this text, by a day that leaves no choice; else None."""
    for _, sign, second, _ in _slashed(text):
        if sign != "." and int(second) > 12:
            return True
    for first, sign, _, _ in _slashed(text):
        if sign != "." and int(first) > 12:
            return False
    return None


def _slashed(text: str) -> Iterator[tuple[str, str, str, str]]:
    for match in islice(_FORMS["year last"].finditer(text), MAX_DAYS):
        yield match[1], match[2], match[3], match[4]


def _all_days(text: str, month_first: bool, known_order: bool | None) -> Iterator[Found]:
    for form, pattern in _FORMS.items():
        for match in islice(pattern.finditer(text), MAX_DAYS):
            sure = 1.0
            if form == "year first":
                year, month, day = match[1], match[3], match[4]
            elif form == "day, month":
                day, month, year = match[1], _month(match[2]), match[3]
            elif form == "month, day":
                month, day, year = _month(match[1]), match[2], match[3]
            else:
                day, month, year = match[1], match[3], match[4]
                if match[2] != ".":  # with points the day comes first, wherever that is written
                    if month_first and int(day) <= 12:
                        day, month = month, day
                    if known_order is None and int(day) <= 12 and int(day) != int(month):
                        sure = AMBIGUOUS
            if len(year) == 2:
                year, sure = f"20{year}", sure * 0.92
            try:
                yield Found(datetime.date(int(year), int(month), int(day)), sure, match.start())
            except ValueError:  # the 31st of February, or no day at all
                continue


def _month(name: str) -> str:
    return str(_MONTHS.get(name.lower(), 0))
