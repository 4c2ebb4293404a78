"""Fields by rules: numbers, amounts, tables, days, and the fields of a document from its text.

German and English, and what else is written the same way. Equal text gives equal fields. A rule
gives its confidence; a field that is not found is null. Time is bounded: the rules look at the
beginning and the end of a long text, and no pattern takes more than one pass over a line.

Numbers: 1.234,56 and 1,234.56 are equal in two countries; the other numbers of the text decide.
Tables: a text is lines of cells, a row is named by its label, and sums that add up are the best
sign that the numbers were read right.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from dovetail.documents.fields import (
    MAX_LINE_ITEMS,
    MAX_TEXT_LENGTH,
    Confidences,
    Fields,
    LineItem,
    overall,
)

# --- numbers and currencies --------------------------------------------------------------------

# fmt: off
CODES = (
    "AED", "AUD", "BGN", "BRL", "CAD", "CHF", "CLP", "CNY", "CZK", "DKK", "EGP", "EUR", "GBP",
    "HKD", "HUF", "IDR", "ILS", "INR", "ISK", "JPY", "KRW", "MAD", "MXN", "MYR", "NGN", "NOK",
    "NZD", "PHP", "PLN", "RON", "RSD", "SAR", "SEK", "SGD", "THB", "TRY", "TWD", "UAH", "USD",
    "VND", "ZAR",
)
# fmt: on
# The currency of a sign, with its confidence: many countries have dollars and crowns.
SIGNS = {
    "€": ("EUR", 0.97),
    "£": ("GBP", 0.93),
    "$": ("USD", 0.85),
    "US$": ("USD", 0.97),
    "CA$": ("CAD", 0.97),
    "A$": ("AUD", 0.95),
    "NZ$": ("NZD", 0.97),
    "HK$": ("HKD", 0.97),
    "S$": ("SGD", 0.9),
    "R$": ("BRL", 0.95),
    "¥": ("JPY", 0.7),
    "₹": ("INR", 0.97),
    "₩": ("KRW", 0.97),
    "₺": ("TRY", 0.97),
    "₴": ("UAH", 0.97),
    "₪": ("ILS", 0.97),
    "zł": ("PLN", 0.97),
    "Kč": ("CZK", 0.97),
    "Fr.": ("CHF", 0.85),
    "SFr.": ("CHF", 0.95),
    "kr": ("SEK", 0.5),
    "Euro": ("EUR", 0.95),
    "EURO": ("EUR", 0.95),
}
_CODES = frozenset(CODES)
CODE_IS_SURE = 0.97
MENTIONED_ONCE = 0.75

_SIGN = "|".join(re.escape(sign) for sign in sorted((*SIGNS, *CODES), key=len, reverse=True))
# Any word of this shape: a lookup in the tables is faster than seventy alternatives.
_CURRENCY = re.compile(
    r"(?<![A-Za-z])(?:[A-Z]{1,2}\$|[A-Z]{3}(?![A-Za-z])|[€£$¥₹₩₺₴₪]|S?Fr\.|zł|Kč"
    r"|(?:kr|Euro|EURO)\b)"
)
_DIGIT_BEFORE = re.compile(r"\d(?:,?[-–—])?[ \t]?$")
_DIGIT_AFTER = re.compile(r"[ \t]{0,30}[-−]?\d")
_CENTS = re.compile(r"\d([.,])\d\d(?![\d.,]*\d)")
_SPACED = re.compile(r"\d{1,3}(?: \d{3}){1,4}(?:[.,]\d{1,4})?")
# An amount and nothing else: sign, minus, number, sign, and the letter of its tax rate.
_WHOLE = re.compile(
    rf"(?P<paren>\()?(?:{_SIGN})?[ ]?(?P<minus>[-−–])?[ ]?(?:{_SIGN})?[ ]?"
    rf"(?P<number>\d[\d.,'’ ]{{0,24}})(?P<after>[-−–])?[ ]?(?:{_SIGN})?\)?"
    r"(?:[ ](?:[A-G]\d?|\*)){0,2}"
)
_AT_THE_END = re.compile(
    rf"(?<![\w.,/:-])(?:{_SIGN})?[ ]?[-−–]?[ ]?(?:{_SIGN})?[ ]?\d[\d.,'’]{{0,24}}[-−–]?[ ]?"
    rf"(?:{_SIGN})?(?:[ ](?:[A-G]\d?|\*)){{0,2}}$"
)
_GROUPS = re.compile(r"[.,]")
_ENDS_IN_CENTS = re.compile(r"[.,]\d\d$")
MAX_AMOUNT_LENGTH = 48
MAX_SIGNS = 2_000


@dataclass(frozen=True, slots=True)
class Amount:
    """A number in a text. `is_exact` if it has the two decimals that money has."""

    value: float
    is_exact: bool
    is_money: bool
    """It has two decimals, or a currency beside it."""


def decimal_sign(text: str) -> str:
    """The decimal sign of this text; the point if it has no cents."""
    found = Counter(_CENTS.findall(text))
    return "," if found[","] > found["."] else "."


def number(text: str, decimal: str = ".") -> float | None:
    """The value of a number in any grouping; None for a date, a version or an address."""
    text = text.replace("'", "").replace("’", "").replace(" ", "").rstrip(".,")
    points, commas = text.count("."), text.count(",")
    if points and commas:
        decimal = "." if text.rfind(".") > text.rfind(",") else ","
        if text.count(decimal) > 1:
            return None
    elif points + commas == 1:
        sign = "." if points else ","
        before, after = text.split(sign)
        # Three digits after the only sign are thousands, unless the text writes cents with it.
        if len(after) != 3 or before in ("", "0") or sign == decimal:
            decimal = sign
        else:
            decimal = "," if sign == "." else "."
    elif points + commas > 1:
        decimal = "," if points else "."  # the same sign twice can only be thousands
    whole, _, cents = text.partition(decimal)
    groups = _GROUPS.split(whole)
    if len(groups) > 1 and (not 1 <= len(groups[0]) <= 3 or any(len(g) != 3 for g in groups[1:])):
        return None
    digits = "".join(groups)
    if not digits.isascii() or not (digits + cents).isdigit() or len(digits) > 12:
        return None
    return round(float(f"{digits}.{cents or 0}"), 4)


def amount(cell: str, decimal: str) -> Amount | None:
    """The amount in this cell; None if the cell is anything else."""
    if len(cell) > MAX_AMOUNT_LENGTH:
        return None
    found = _WHOLE.fullmatch(cell.strip())
    if found is None:
        return None
    text = found["number"].rstrip(" ")
    if " " in text and not _SPACED.fullmatch(text):
        return None
    value = number(text, decimal)
    if value is None:
        return None
    if found["minus"] or found["paren"] or (found["after"] and text[-1] not in ".,"):
        value = -value
    is_exact = bool(_ENDS_IN_CENTS.search(text)) or (text[-1] in ".," and bool(found["after"]))
    return Amount(value, is_exact, is_exact or _has_currency(cell))


def _has_currency(cell: str) -> bool:
    return any(sign in SIGNS or sign in _CODES for sign in _CURRENCY.findall(cell))


def split_at_the_end(text: str, decimal: str) -> tuple[str, Amount | None]:
    """`Total due: EUR 12.50` as its words and the amount after them."""
    text = text.rstrip()
    tail = text[-MAX_AMOUNT_LENGTH:]
    found = _AT_THE_END.search(tail)
    if found is None:
        return text, None
    it = amount(found[0], decimal)
    if it is None:
        return text, None
    return text[: len(text) - len(found[0])].rstrip(" :"), it


def currency_of(text: str) -> tuple[str | None, float]:
    """The currency of most amounts in a text, with its confidence."""
    # A currency beside a number counts more than one that is only mentioned.
    beside: Counter[str] = Counter()
    mentioned: Counter[str] = Counter()
    for match in islice(_CURRENCY.finditer(text), MAX_SIGNS):
        sign = match[0]
        if sign not in SIGNS and sign not in _CODES:
            continue
        mentioned[sign] += 1
        before = text[max(0, match.start() - 4) : match.start()]
        if _DIGIT_AFTER.match(text, match.end()) or _DIGIT_BEFORE.search(before):
            beside[sign] += 1
    votes: Counter[str] = Counter()
    surest: dict[str, float] = {}
    for sign, times in mentioned.items():
        code, sure = SIGNS.get(sign, (sign, CODE_IS_SURE))
        votes[code] += times + 4 * beside[sign]
        sure = sure if beside[sign] or times > 1 else min(sure, MENTIONED_ONCE)
        # A sign together with its code is unambiguous.
        surest[code] = max(surest[code], sure, CODE_IS_SURE) if code in surest else sure
    # A code says which dollars or crowns are meant.
    for sign, family in (("$", "AUD CAD HKD NZD SGD USD MXN CLP"), ("kr", "DKK ISK NOK SEK")):
        named = [code for code in family.split() if mentioned[code]]
        if mentioned[sign] and len(named) == 1:
            code = SIGNS[sign][0]
            if named[0] != code:
                votes[named[0]] += votes.pop(code, 0)
                surest.pop(code, None)
            surest[named[0]] = CODE_IS_SURE
    if not votes:
        return None, 0.0
    # Ties are broken by name: equal text gives equal answers.
    (code, most), *others = sorted(votes.items(), key=lambda pair: (-pair[1], pair[0]))
    share = most / (most + others[0][1]) if others else 1.0
    return code, round(surest[code] * min(1.0, 0.4 + 0.7 * share), 4)


# --- sums --------------------------------------------------------------------------------------

MAX_LINE_LENGTH = 400
ADDS_UP = 0.97
_CENT = 0.011

_GAPS = re.compile(r"\t| {2,}|\.{3,}|_{3,}")
_DIGIT = re.compile(r"\d")
_LETTERS = re.compile(r"[^\W\d_]{2}")

# The meaning of a label in lower case; the first match decides.
_TAX = r"vat|tax(?:es)?|mwst|ust|umsatzsteuer|mehrwertsteuer|gst|hst|tva|iva"
_TOTAL = r"total|summe|gesamt|betrag|brutto|balance|amount|importe|montant"
_LABELS = {
    "count": re.compile(
        r"\b(?:items?|artikel|qty|quantity|anzahl|positionen|pages?|seiten?|hours|stunden|points"
        r"|punkte)\b\s*[:#]?$|^(?:total|anzahl)\s+(?:items?|artikel|positionen|hours)"
    ),
    "paid": re.compile(
        r"\b(?:paid|cash|change|tendered|gegeben|rückgeld|wechselgeld|bar|card|karte|visa|ec"
        r"|mastercard|girocard|maestro|amex|paypal|bezahlt|kartenzahlung|anzahlung|deposit"
        r"|gift ?card|saved|savings|erspart|points|previous balance)\b"
    ),
    "subtotal": re.compile(
        r"\bsub[- ]?total|zwischensumme|\bnet(?:to)?\b|nettobetrag|warenwert|nettosumme"
        r"|(?:total|amount|summe|gesamt\w*)[^\w]{1,3}(?:excl|ex\b|before|without|ohne|zzgl|h\.?t\b)"
    ),
    "tax": re.compile(
        rf"\b(?:{_TAX})\b[\W\d]{{0,12}}(?:{_TOTAL})?\w{{0,8}}$|(?:total|summe)\W{{1,3}}(?:{_TAX})\b"
        rf"|^(?:incl|inkl|plus|zzgl|enthalten|davon|included|darin)\w*\W{{1,3}}|\b(?:{_TAX})\b"
        r"(?=[^a-z]*$)"
    ),
    "grand": re.compile(
        r"grand total|total (?:due|amount|payable|to pay|incl|price|cost)|amount (?:due|payable)"
        r"|balance due|invoice (?:total|amount)|to be paid|please pay|order total"
        r"|zu zahlen|zahlbetrag|gesamtbetrag|rechnungsbetrag|gesamtsumme|endbetrag|endsumme"
        r"|bruttobetrag|summe brutto|gesamt brutto|rechnungssumme|total ttc|total à payer"
        r"|total (?:general|generale)"
    ),
    "total": re.compile(r"\b(?:total|summe|gesamt|brutto|totale|sum)\b"),
    "extra": re.compile(
        r"\b(?:shipping|postage|delivery|freight|versand\w*|porto|lieferung|discount|rabatt"
        r"|skonto|tip|trinkgeld|service charge|rounding|rundung|coupon|gutschein)\b"
    ),
}

# The meaning of a column by its heading; in this order, because `unit price` contains `unit`.
_COLUMNS = {
    "unit_price": re.compile(r"unit|einzel|\beach\b|\brate\b|stückpreis|e-?preis|per item|à"),
    "tax": re.compile(rf"\b(?:{_TAX})\b|%"),
    "quantity": re.compile(r"qty|quantity|menge|anzahl|hours|stunden|\bstd\b|units|stück|\bdays\b"),
    "description": re.compile(
        r"descr|item|article|artikel|bezeichnung|beschreibung|leistung|product|produkt|service"
        r"|position\b|ware|details|title|tätigkeit|gegenstand"
    ),
    "amount": re.compile(r"amount|total|betrag|gesamt|summe|price|preis|value|wert|sum\b|eur|usd"),
    "number": re.compile(r"^(?:no|nr|pos|#|sku|code|art\.?-?nr|line)\b\.?|^#"),
}
_COUNTED = re.compile(
    r"(\d{1,6}(?:[.,]\d{1,3})?)\s?(?:x|×|h|hrs?|hours?|pcs?|pieces?|stk|stück|std|stunden?|kg|g|l|m"
    r"|km|tage?|days?|units?|boxe?s?|psch|pauschal|mon(?:ate?|ths?)?|st)?\.?",
    re.IGNORECASE,
)
_TIMES_FIRST = re.compile(r"(\d{1,4}(?:[.,]\d{1,3})?)\s?[x×*]\s?(?=\S)", re.IGNORECASE)
_TIMES_LAST = re.compile(
    r"\s(\d{1,4}(?:[.,]\d{1,3})?)\s?(?:kg|l|pcs?|stk\.?)?\s?[x×*@à]\s?(\d[\d.,]{0,12})\s?(?:€|eur)?$",
    re.IGNORECASE,
)
_TIMES_ALONE = re.compile(
    r"(\d{1,4}(?:[.,]\d{1,3})?)\s?(?:kg|l|pcs?|stk\.?|stück)?\s?[x×*@à]", re.IGNORECASE
)
_ORDINAL = re.compile(r"(?:\d{1,3}[.)]|#\d{1,3})\s{1,3}(?=\D)")


@dataclass(frozen=True, slots=True)
class TableRow:
    """A line: its cells, its words and its amounts."""

    cells: tuple[str, ...]
    label: str
    amounts: tuple[Amount, ...]
    meaning: str | None
    """A key of `_LABELS`; None for any other row, and for a row without amounts."""


@dataclass(slots=True)
class Sums:
    """Total and line items of a text, with their confidences."""

    total: float | None = None
    total_sure: float = 0.0
    items: list[LineItem] = field(default_factory=list)
    items_sure: float = 0.0


def sums_of(rows: Sequence[TableRow], decimal: str) -> Sums:
    """Total and line items. `decimal` is the text's sign for cents."""
    sums = Sums(items=_items(rows, decimal))
    named = _named(rows)
    subtotals, taxes = named.get("subtotal", []), named.get("tax", [])
    extras = sum(named.get("extra", []))
    sold = round(sum(item.amount or 0.0 for item in sums.items), 4)
    bases = (*subtotals[-1:], *([sold] if sold else []))
    reached = [
        base + tax + extra
        for base in bases
        for tax in (sum(taxes), taxes[-1] if taxes else 0.0, 0.0)
        for extra in (extras, 0.0)
    ]
    sums.total, sums.total_sure = _total(named, reached)
    if sums.total is None:
        return _by_the_largest(sums, rows)
    if sums.total_sure < ADDS_UP and subtotals and taxes:
        sums.total_sure = min(sums.total_sure, 0.7)  # its own sums do not lead to it
    if sums.items:
        goals = [sums.total - tax - extra for tax in (sum(taxes), 0.0) for extra in (extras, 0.0)]
        if any(_same(sold, goal) for goal in (*goals, *subtotals)):
            sums.items_sure = ADDS_UP
        else:
            agreeing = sum(map(_agrees, sums.items)) / len(sums.items)
            sums.items_sure = round(0.45 + 0.2 * agreeing, 4)
            sums.total_sure = min(sums.total_sure, 0.85)
    return sums


def _same(one: float, other: float) -> bool:
    return abs(one - other) < _CENT


# --- rows --------------------------------------------------------------------------------------


def cells_of(line: str) -> list[str]:
    """The parts of a line, separated by gaps."""
    parts = _GAPS.split(line[:MAX_LINE_LENGTH].replace("|", "\t"))
    return [part.strip() for part in parts if part.strip()]


def row_of(line: str, decimal: str) -> TableRow:
    """The line as a row."""
    cells = cells_of(line)
    words, amounts = [], []
    for cell in cells:
        it = amount(cell, decimal)
        if it is not None:
            cell = ""
        elif _DIGIT.search(cell):
            cell, it = split_at_the_end(cell, decimal)
        if cell:
            words.append(cell)
        if it is not None:
            amounts.append(it)
    label = " ".join(words)
    meaning = _meaning(label.lower()) if amounts else None
    return TableRow(tuple(cells), label, tuple(amounts), meaning)


def _meaning(label: str) -> str | None:
    label = label.rstrip(" :")[:80]
    for name, pattern in _LABELS.items():
        if pattern.search(label):
            if name == "tax" and _LABELS["grand"].search(label):
                return "grand"
            return name
    return None


def _named(rows: Sequence[TableRow]) -> dict[str, list[float]]:
    """The amounts of each meaning, in order; for a label without amount, the amount below it."""
    found: dict[str, list[float]] = {}
    above: TableRow | None = None
    for row in rows:
        meaning = row.meaning
        if not row.label and len(row.amounts) == 1 and above is not None and not above.amounts:
            meaning = _meaning(above.label.lower())
        money = [each for each in row.amounts if each.is_money]
        if meaning is not None and money:
            found.setdefault(meaning, []).append(money[-1].value)
        above = row
    return found


def _total(named: dict[str, list[float]], reached: Sequence[float]) -> tuple[float | None, float]:
    """The total by its label; of several, the one that the other numbers add up to."""
    by_label = [
        (value, sure)
        for name, sure in (("grand", 0.93), ("total", 0.88))
        # Largest first: after a deposit, the amount due is less than the total.
        for value in sorted(set(named.get(name, [])), reverse=True)
        if value
    ]
    for value, _ in by_label:
        if any(_same(value, each) for each in reached):
            return value, ADDS_UP
    if not by_label:
        return None, 0.0
    value, sure = by_label[0]
    return value, sure if len({each for each, _ in by_label}) == 1 else round(sure - 0.15, 4)


def _by_the_largest(sums: Sums, rows: Sequence[TableRow]) -> Sums:
    money = [each.value for row in rows for each in row.amounts if each.is_money]
    if money:
        sums.total, sums.total_sure = max(money), 0.4
    if sums.items:
        sold = round(sum(item.amount or 0.0 for item in sums.items), 4)
        sums.items_sure = 0.5
        if sums.total is not None and _same(sold, sums.total) and len(sums.items) > 1:
            sums.total_sure = 0.6
    return sums


# --- line items --------------------------------------------------------------------------------


def _items(rows: Sequence[TableRow], decimal: str) -> list[LineItem]:
    """The line items, down to the first sum."""
    items: list[LineItem] = []
    columns: list[str] = []
    for row in rows:
        if len(items) == MAX_LINE_ITEMS:
            break
        if head := _columns(row):
            columns = head
            continue
        if counted := _TIMES_ALONE.fullmatch(row.label):
            if items and row.amounts:  # `3 x 0.29` below what was bought three times
                items[-1] = _counted(items[-1], number(counted[1], decimal), row.amounts[0].value)
            continue
        item = _item(row, columns, decimal)
        if item is not None and columns and item.quantity is not None:
            items.append(item)  # below a heading, `Gift card` and `Tax advice` are items, too
        elif row.meaning in ("subtotal", "grand", "total", "tax"):
            if any(each.is_money for each in row.amounts):
                break
        elif item is not None and row.meaning is None:
            items.append(item)
    return items


def _counted(item: LineItem, quantity: float | None, unit_price: float) -> LineItem:
    counted = item.model_copy(update={"quantity": quantity, "unit_price": unit_price})
    return counted if _agrees(counted) else item


def _agrees(item: LineItem) -> bool:
    """Whether quantity times unit price is the amount."""
    if not item.quantity or item.unit_price is None or item.amount is None:
        return False
    return _multiply(item.quantity, item.unit_price, item.amount)


def _multiply(quantity: float, unit_price: float, cost: float) -> bool:
    # A price has whole cents, so each piece may be half a cent off.
    return abs(quantity * unit_price - cost) < 0.006 + 0.005 * abs(quantity)


def _columns(row: TableRow) -> list[str]:
    """The meanings of the columns, if this row is the heading of a table."""
    if not 2 <= len(row.cells) <= 10 or any(each.is_exact for each in row.amounts):
        return []
    found = []
    for cell in row.cells:
        lowered = cell.lower()[:40]
        names = (name for name, words in _COLUMNS.items() if words.search(lowered))
        found.append(next(names, ""))
    return found if "description" in found and len(set(found) - {"", "number"}) > 1 else []


def _item(row: TableRow, columns: Sequence[str], decimal: str) -> LineItem | None:
    if not row.amounts:
        return None
    if columns and len(columns) == len(row.cells):
        named = _by_columns(row, columns, decimal)
    else:
        named = _by_order(row, decimal)
    if named is None:
        return None
    description, quantity, unit_price, cost = named
    description = _ORDINAL.sub("", description, count=1).strip(" :-")[:MAX_TEXT_LENGTH]
    if not _LETTERS.search(description):
        return None
    return LineItem(description=description, quantity=quantity, unit_price=unit_price, amount=cost)


_Named = tuple[str, float | None, float | None, float]


def _by_columns(row: TableRow, columns: Sequence[str], decimal: str) -> _Named | None:
    cells: dict[str, str] = {}
    for name, cell in zip(columns, row.cells, strict=True):
        cells.setdefault(name, cell)
    # Of two columns with one meaning, as `price` and `total price`, the last is the amount.
    last = dict(zip(columns, row.cells, strict=True))
    cost = amount(last.get("amount", ""), decimal)
    if cost is None or "description" not in cells:
        return None
    price = amount(cells.get("unit_price", ""), decimal)
    if price is None and columns.count("amount") > 1:
        price = amount(cells["amount"], decimal)
    return (
        cells["description"],
        _count(cells.get("quantity", ""), decimal),
        price.value if price else None,
        cost.value,
    )


def _by_order(row: TableRow, decimal: str) -> _Named | None:
    """Words first, the amount last, and between them quantity and unit price."""
    if not row.amounts[-1].is_exact:
        return None
    cost = row.amounts[-1].value
    description, quantity, unit_price = row.label, None, None
    before = [each.value for each in row.amounts[:-1]]
    for cell in row.cells[1:-1]:
        if (counted := _count(cell, decimal)) is not None and not cell[-1].isdigit():
            quantity, description = counted, description.replace(f" {cell}", "", 1)
    if found := _TIMES_FIRST.match(description):
        quantity = number(found[1], decimal)
        description = description[found.end() :]
    elif found := _TIMES_LAST.search(description):
        quantity, unit_price = number(found[1], decimal), number(found[2], decimal)
        description = description[: found.start()]
    if len(before) >= 2 and _multiply(before[-2], before[-1], cost):
        quantity, unit_price = before[-2], before[-1]
    elif len(before) == 1 and quantity is None:
        if row.amounts[0].is_exact:
            unit_price = before[0]
        else:
            quantity = before[0]
    elif len(before) == 1:
        unit_price = before[0]
    return description, quantity, unit_price, cost


def _count(cell: str, decimal: str) -> float | None:
    found = _COUNTED.fullmatch(cell.strip())
    return number(found[1], decimal) if found else None


# --- days --------------------------------------------------------------------------------------

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
_NAME = "[a-zà-ÿA-ZÀ-Ý]{3,10}"  # any word: a lookup in the table is faster than sixty names
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
CONTEXT_LENGTH = 48
"""How many characters before a day decide its meaning."""
MAX_DAYS = 100
AMBIGUOUS = 0.55
"""The confidence of a day such as 03/04/2026, which is in March or in April."""


@dataclass(frozen=True, slots=True)
class FoundDay:
    day: datetime.date
    sure: float
    start: int


def day_of(text: str, *, is_american: bool = False) -> tuple[str | None, float]:
    """The day of issue, with its confidence. `is_american`: the currency is USD."""
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
    """The text before it on its line; if that is empty, the line above."""
    before = text[max(0, start - CONTEXT_LENGTH) : start]
    line = before.rpartition("\n")[2]
    if line.strip(" \t:"):
        return line
    above = before.rstrip().rpartition("\n")[2]
    # A label is short; a long line above is a sentence and says nothing about this day.
    return above if len(above) <= 30 else ""


def _order(text: str) -> bool | None:
    """Whether the month comes first in this text, by an unambiguous day; else None."""
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


def _all_days(text: str, month_first: bool, known_order: bool | None) -> Iterator[FoundDay]:
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
                if match[2] != ".":  # with points the day always comes first
                    if month_first and int(day) <= 12:
                        day, month = month, day
                    if known_order is None and int(day) <= 12 and int(day) != int(month):
                        sure = AMBIGUOUS
            if len(year) == 2:
                year, sure = f"20{year}", sure * 0.92
            try:
                yield FoundDay(datetime.date(int(year), int(month), int(day)), sure, match.start())
            except ValueError:  # as the 31st of February
                continue


def _month(name: str) -> str:
    return str(_MONTHS.get(name.lower(), 0))


# --- fields ------------------------------------------------------------------------------------

NAME = "rules-1"
"""Part of the cache key: change the number if the rules find other fields."""

BEGINNING, END = 40_000, 12_000
FIRST_LINES, LAST_LINES = 500, 150

# The words of each type with their weights; a title on its own line weighs most.
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
MAX_TITLE_LENGTH = 60

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
    """The fields that the rules find in a text."""
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
        # A price in a letter is not its total, and a list in it is no table.
        sums.items, sums.items_sure = [], 0.0
        sums.total_sure = round(0.8 * sums.total_sure, 4)
        if sums.total_sure < 0.5:
            sums.total, sums.total_sure = None, 0.0
    if sums.total is None:  # the currency is that of the total
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
    """The type with the highest weight of words, if that is enough."""
    if len(lowered) > _TITLE_CHARACTERS + _CLOSING_CHARACTERS:  # a book has every word
        lowered = lowered[:_TITLE_CHARACTERS] + lowered[-_CLOSING_CHARACTERS:]
    tokens = set(_TOKEN.findall(lowered))
    titles = [
        cell.lower().strip(" *=-#:.")
        for row in rows[:_TITLE_LINES]
        for cell in row.cells
        if len(cell) <= MAX_TITLE_LENGTH
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
    # Ties are broken by name: equal text gives equal answers.
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
    """The issuer: by a label, a firm at the top, or the first name."""
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
    # A document of unknown type need not begin with a name.
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
    """The cell as a name, if it can be one."""
    name = " ".join(cell.strip(" *=-#:|·•~+\t").split())
    if not 3 <= len(name) <= min(80, MAX_TEXT_LENGTH) or len(_LETTER.findall(name)) < 3:
        return None
    if _NO_NAME.search(name) or any(_is_title(name.lower(), kind) for kind in _TITLES):
        return None
    # An address after the name: `Muster GmbH · Hauptstraße 1 · 10115 Berlin`.
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
