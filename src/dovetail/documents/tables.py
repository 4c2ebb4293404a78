"""Rows with amounts: what was sold, and what it comes to.

Reads a text as lines of cells, names each row by its label, and checks that the numbers add up:
that they do is the best sign that they were read right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.documents.amounts import Amount, amount, number, split_at_the_end
from dovetail.documents.fields import LONGEST_TEXT, MAX_LINE_ITEMS, LineItem

LONGEST_LINE = 400
ADDS_UP = 0.97
_CENT = 0.011

_GAPS = re.compile(r"\t| {2,}|\.{3,}|_{3,}")
_DIGIT = re.compile(r"\d")
_LETTERS = re.compile(r"[^\W\d_]{2}")

# What a label is; the first row that matches decides. Lower case.
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
_TAXED = re.compile(rf"\b(?:{_TAX})\b")

# What a column is, by the word at its head; in this order, since `unit price` has `unit` in it.
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
    """A line: its cells, what of it is words, what of it are amounts."""

    cells: tuple[str, ...]
    label: str
    amounts: tuple[Amount, ...]
    meaning: str | None
    """Of `_LABELS`; None for any other row, and for one without amounts."""


@dataclass(slots=True)
class Sums:
    """What a text says of its money, and how sure it is."""

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
        sums.total_sure = min(sums.total_sure, 0.7)  # it says how it comes about, and does not
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
    """The parts of a line that stand apart."""
    parts = _GAPS.split(line[:LONGEST_LINE].replace("|", "\t"))
    return [part.strip() for part in parts if part.strip()]


def row_of(line: str, decimal: str) -> TableRow:
    """The line with its cells named."""
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
    """The amounts under each meaning, in order; of a bare label, the one below it."""
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
    """The total by its label; of several, the one that the other numbers lead to."""
    by_label = [
        (value, sure)
        for name, sure in (("grand", 0.93), ("total", 0.88))
        # What is due after a deposit is less than what the whole costs.
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
    """Each row of what was sold, down to the first sum."""
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
            items.append(item)  # in a table with a head, so are `Gift card` and `Tax advice`
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
    """Whether its own numbers multiply to what it costs."""
    if not item.quantity or item.unit_price is None or item.amount is None:
        return False
    return _multiply(item.quantity, item.unit_price, item.amount)


def _multiply(quantity: float, unit_price: float, cost: float) -> bool:
    # A price is given in whole cents, so each piece may be half a cent off.
    return abs(quantity * unit_price - cost) < 0.006 + 0.005 * abs(quantity)


def _columns(row: TableRow) -> list[str]:
    """What the columns are, if this row is the head of a table."""
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
    description = _ORDINAL.sub("", description, count=1).strip(" :-")[:LONGEST_TEXT]
    if not _LETTERS.search(description):
        return None
    return LineItem(description=description, quantity=quantity, unit_price=unit_price, amount=cost)


_Named = tuple[str, float | None, float | None, float]


def _by_columns(row: TableRow, columns: Sequence[str], decimal: str) -> _Named | None:
    cells: dict[str, str] = {}
    for name, cell in zip(columns, row.cells, strict=True):
        cells.setdefault(name, cell)
    # Where two columns are called alike, as in `price` and `total price`, the last is the amount.
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
    """Words first, the amount last, and between them what multiplies to it."""
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
