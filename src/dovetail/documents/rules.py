"""Fields by rules: what a document says of itself, found without a language model.

German and English, and all that is written the same way. The same text always gives the same
fields. Each rule gives its confidence; a field that it does not find is null. Of several days, the
rules choose the one on which the document was issued. Time is bounded: only the beginning and the
end of a long text are read, and no pattern passes a line more than once.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from dovetail.documents.amounts import currency_of, decimal_sign
from dovetail.documents.fields import LONGEST_TEXT, Confidences, Fields, overall
from dovetail.documents.tables import Sums, TableRow, row_of, sums_of

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


NAME = "rules-1"
"""Part of what is cached: rules that find something else get another number."""

BEGINNING, END = 40_000, 12_000
FIRST_LINES, LAST_LINES = 500, 150

# Words of each type, with how much one says; a title of its own line says most.
_WORDS = {
    "invoice": {
        "invoice": 2, "rechnung": 2, "facture": 2, "factura": 2, "fattura": 2, "invoice no": 2,
        "invoice number": 2, "rechnungsnummer": 3, "rechnungs-nr": 3, "rechnungsdatum": 2,
        "rechnungsnr": 3, "bill to": 2, "amount due": 2, "due date": 2, "payment terms": 1,
        "zahlbar": 2, "zahlungsziel": 2, "fällig": 1, "iban": 1, "purchase order": 1,
        "leistungszeitraum": 1, "payable": 1, "remit": 1, "kundennummer": 1,
    },
    "receipt": {
        "receipt": 3, "quittung": 3, "kassenbon": 4, "kassenbeleg": 4, "bon-nr": 3, "beleg": 1,
        "cashier": 3, "kassierer": 3, "bediener": 2, "es bediente": 3, "change": 1, "cash": 1,
        "rückgeld": 3, "gegeben": 2, "card payment": 2, "kartenzahlung": 2, "girocard": 2,
        "visa": 1, "mastercard": 1, "contactless": 1, "terminal": 1, "paid": 1, "bezahlt": 1,
        "thank you for your": 1, "danke für ihren": 2, "thank you for shopping": 2, "table": 1,
        "tisch": 1, "tse": 1, "approval code": 2, "till": 1,
    },
    "contract": {
        "contract": 2, "agreement": 3, "vertrag": 3, "mietvertrag": 3, "dienstleistungsvertrag": 3,
        "hereinafter": 3, "nachfolgend": 2, "im folgenden": 2, "the parties": 3,
        "vertragsparteien": 3,
        "governing law": 3, "termination": 2, "kündigung": 1, "whereas": 2, "in witness whereof": 3,
        "gerichtsstand": 1, "shall": 1, "auftragnehmer": 1, "laufzeit": 1, "§ 1": 2,
        "entered into": 2, "confidentiality": 1, "by and between": 2,
    },
    "letter": {
        "dear": 3, "sehr geehrte": 4, "liebe": 1, "yours sincerely": 4, "yours faithfully": 4,
        "sincerely": 2, "kind regards": 3, "best regards": 3, "with regards": 2,
        "mit freundlichen grüßen": 4, "freundliche grüße": 3, "viele grüße": 2, "betreff": 2,
        "subject:": 1, "enclosure": 1, "anlage": 1, "re:": 1,
    },
}  # fmt: skip
_TITLES = {
    "invoice": re.compile(r"(?:tax |proforma |vat )?invoice|rechnung|facture|factura|fattura"),
    "receipt": re.compile(r"(?:sales |cash |payment )?receipt|quittung|kassenbon|kassenbeleg|bon"),
    "contract": re.compile(r"(?:\w{3,20}[ -]){0,3}(?:agreement|contract)|\w{0,24}vertrag"),
    "letter": re.compile(r"letter|brief|schreiben"),
}
_NUMBERED = re.compile(r"(?:no|nr|number|num|nummer)\b|n°|#|\d|[a-z]{1,4}[-/]?\d")
_TOKEN = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_PHRASES = {
    kind: {word: worth for word, worth in words.items() if not _TOKEN.fullmatch(word)}
    for kind, words in _WORDS.items()
}
_WORTH_OF_A_TITLE = 6
_WORTH_OF_A_TYPE = 4
_WORTH_OF_MONEY = 3
_TITLE_LINES = 25
_TITLE_CHARACTERS, _CLOSING_CHARACTERS = 6_000, 2_000
LONGEST_TITLE = 60

_LEGAL = re.compile(
    r"(?<![\w.])(?:GmbH(?: & Co\.? KG)?|gGmbH|AG|KG|OHG|UG|GbR|e\.?K\.?|e\.V\.|SE|Ltd|Limited"
    r"|LLC|LLP|Inc|Corp|Corporation|Company|Co|PLC|plc|S\.?A\.?S?|SARL|S\.à r\.l|B\.?V|N\.?V|Oy|AB"
    r"|ApS|AS|A/S|S\.?r\.?l|S\.?p\.?A|S\.?L|Pty|Sp\. z o\.o|Kft|s\.r\.o)(?:\.|(?![\w]))"
)
_ISSUER = re.compile(
    r"(?:vendor|seller|supplier|merchant|sold by|issued by|from|sender|lieferant|verkäufer"
    r"|absender|rechnungssteller|aussteller|auftragnehmer|service provider|contractor|landlord"
    r"|vermieter)\s?:?\s*"
)
_RECIPIENT = re.compile(
    r"(?:bill(?:ed)? to|ship to|sold to|invoice to|deliver to|to|customer|client|buyer|recipient"
    r"|attention|attn|an|kunde|empfänger|rechnungsempfänger|rechnungsanschrift|lieferanschrift"
    r"|lieferadresse|käufer|auftraggeber|tenant|mieter)\s?:?\s*"
)
_BETWEEN = re.compile(r"\b(?:between|zwischen)\b[\s:]{0,6}(?:der |dem |den )?", re.IGNORECASE)
_PARTY_ENDS = re.compile(
    r"\n\n|\n?\(|,|;| and | und |\bwith its\b|\bhereinafter\b|\bmit sitz\b", re.I
)
_NO_NAME = re.compile(
    r"@|https?:|www\.|\btel\b|phone|fax|iban|\bbic\b|\bvat\b|ust-?id|steuernummer|page \d|seite \d"
    r"|\d{4,}|^\d|^dear\b|^sehr geehrte|^re:|^betreff|^date|^datum|customer copy|kundenbeleg"
    r"|welcome|willkommen|^original$|^copy$|^kopie$|duplicate|confidential|vertraulich",
    re.IGNORECASE,
)
_LETTER = re.compile(r"[^\W\d_]")
_PARTS = re.compile(r"[·•,;]")
_ADDRESS_FOLLOWS = re.compile(r"\s[·•|]\s")
_HEAD_LINES = 12
_FOOT_LINES = 6


def fields_of(text: str) -> Fields:
    """What the rules find in a text."""
    if len(text) > BEGINNING + END:
        text = f"{text[:BEGINNING]}\n\n{text[-END:]}"
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) > FIRST_LINES + LAST_LINES:
        lines = lines[:FIRST_LINES] + lines[-LAST_LINES:]
    lowered = text.lower()
    decimal = decimal_sign(text)
    rows = [row_of(line, decimal) for line in lines]
    sums = sums_of(rows, decimal)
    currency, currency_sure = currency_of(text)
    kind, kind_sure = _type_of(rows, lowered, sums)
    vendor, vendor_sure = _vendor_of(text, rows, lowered, kind)
    day, day_sure = day_of(text, is_american=currency == "USD")
    if kind in ("contract", "letter"):
        # A price in a letter is not what the letter comes to, and a list in it is no table.
        sums.items, sums.items_sure = [], 0.0
        sums.total_sure = round(0.8 * sums.total_sure, 4)
        if sums.total_sure < 0.5:
            sums.total, sums.total_sure = None, 0.0
    if sums.total is None:  # of which it is the currency
        currency, currency_sure = None, 0.0
    sure = {
        "type": kind_sure,
        "vendor": vendor_sure,
        "date": day_sure,
        "currency": currency_sure,
        "total": sums.total_sure,
        "line_items": sums.items_sure,
    }
    return Fields(
        type=kind,
        vendor=vendor,
        date=day,
        currency=currency,
        total=sums.total,
        line_items=sums.items,
        confidence=overall(kind, sure),
        confidences=Confidences(**sure),
    )


# --- type --------------------------------------------------------------------------------------


def _type_of(rows: Sequence[TableRow], lowered: str, sums: Sums) -> tuple[str, float]:
    """The type with the most words that speak for it, if those are enough."""
    if len(lowered) > _TITLE_CHARACTERS + _CLOSING_CHARACTERS:  # in a book there is every word
        lowered = lowered[:_TITLE_CHARACTERS] + lowered[-_CLOSING_CHARACTERS:]
    tokens = set(_TOKEN.findall(lowered))
    titles = [
        cell.lower().strip(" *=-#:.")
        for row in rows[:_TITLE_LINES]
        for cell in row.cells
        if len(cell) <= LONGEST_TITLE
    ]
    scores = {}
    for kind, words in _WORDS.items():
        scores[kind] = sum(worth for word, worth in words.items() if word in tokens)
        scores[kind] += sum(w for phrase, w in _PHRASES[kind].items() if phrase in lowered)
        if any(_is_title(cell, kind) for cell in titles):
            scores[kind] += _WORTH_OF_A_TITLE
    for kind in ("invoice", "receipt"):
        if sums.items:
            scores[kind] += 1
        elif sums.total is None:
            scores[kind] -= _WORTH_OF_MONEY
    # By name where two have as many: the same text gives the same answer.
    (most, kind), (next_, _) = sorted(
        ((score, kind) for kind, score in scores.items()), key=lambda pair: (-pair[0], pair[1])
    )[:2]
    if most < _WORTH_OF_A_TYPE:
        return "other", 0.4
    ahead = min(1.0, 2 * (most - next_) / most)
    return kind, round(min(0.97, 0.65 + 0.03 * most) * (0.7 + 0.3 * ahead), 4)


def _is_title(cell: str, kind: str) -> bool:
    found = _TITLES[kind].match(cell)
    if found is None:
        return False
    rest = cell[found.end() :].strip(" :.")
    # `Invoice`, `Invoice no. 117` and `Rechnung 2026-114`, but not `invoices are paid monthly`.
    return not rest or bool(_NUMBERED.match(rest))


# --- vendor ------------------------------------------------------------------------------------


def _vendor_of(
    text: str, rows: Sequence[TableRow], lowered: str, kind: str
) -> tuple[str | None, float]:
    """The issuer: a labelled name, a firm in the head, or the first name of the text."""
    if kind == "contract" and (found := _first_party(text)):
        return found, 0.9
    best: tuple[float, str] | None = None
    for name, sure in _candidates(rows):
        if lowered.count(name.lower()) > 1:
            sure = min(0.97, sure + 0.05)
        if best is None or sure > best[0]:
            best = (sure, name)
    if best is None:
        return None, 0.0
    # A text of unknown type need not begin with a name either.
    return best[1], round(best[0] if kind != "other" else 0.6 * best[0], 4)


def _candidates(rows: Sequence[TableRow]) -> Iterator[tuple[str, float]]:
    recipient_until = -1
    column: int | None = None
    is_first = True
    for number, row in enumerate(rows[: 2 * _HEAD_LINES]):
        cells = row.cells
        for place, cell in enumerate(cells):
            lowered = cell.lower()
            if found := _ISSUER.fullmatch(lowered):
                below = rows[number + 1].cells if number + 1 < len(rows) else ()
                beside = cells[place + 1 : place + 2] if len(cells) == 2 and place == 0 else ()
                if len(below) == len(cells):
                    beside = below[place : place + 1]
                elif not beside:
                    beside = below[:1]
                yield from ((name, 0.93) for name in map(_as_name, beside) if name)
            elif (found := _ISSUER.match(lowered)) and ":" in found[0]:
                if name := _as_name(cell[found.end() :]):
                    yield name, 0.95
            elif found := _RECIPIENT.match(lowered):
                if found.end() == len(lowered) or ":" in found[0]:
                    recipient_until, column = number + 4, place if len(cells) > 1 else None
            elif number <= recipient_until and column in (None, place):
                continue
            elif name := _as_name(cell):
                if _LEGAL.search(name):
                    yield name, 0.92 if number < _HEAD_LINES else 0.7
                elif is_first and number < 4:
                    yield name, 0.84
                    is_first = False
    for row in rows[-_FOOT_LINES:]:
        for cell in row.cells:
            if not _LEGAL.search(cell):
                continue
            for part in _PARTS.split(cell):
                if (name := _as_name(part)) and _LEGAL.search(name):
                    yield name, 0.66


def _as_name(cell: str) -> str | None:
    """The cell, if it could be whom people call by it."""
    name = " ".join(cell.strip(" *=-#:|·•~+\t").split())
    if not 3 <= len(name) <= min(80, LONGEST_TEXT) or len(_LETTER.findall(name)) < 3:
        return None
    if _NO_NAME.search(name) or any(_is_title(name.lower(), kind) for kind in _TITLES):
        return None
    # An address line behind the name: `Muster GmbH · Hauptstraße 1 · 10115 Berlin`.
    name = _ADDRESS_FOLLOWS.split(name)[0].rstrip(" ,")
    if (found := _LEGAL.search(name)) and "," in name[found.end() :]:
        name = name[: found.end()]
    return name or None


def _first_party(text: str) -> str | None:
    found = _BETWEEN.search(text)
    if found is None:
        return None
    party = text[found.end() : found.end() + 200]
    if legal := _LEGAL.search(party):
        before = party[: legal.end()]
        if len(before) < 90 and not _PARTY_ENDS.search(before.strip()[:-1]):
            return _as_name(before)
    return _as_name(_PARTY_ENDS.split(party.strip(), maxsplit=1)[0])
