"""Numbers as people write them, and the money they are in.

1.234,56 and 1,234.56 are the same number in two countries; the other numbers of a text say which
country it is from.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import islice

# fmt: off
CODES = (
    "AED", "AUD", "BGN", "BRL", "CAD", "CHF", "CLP", "CNY", "CZK", "DKK", "EGP", "EUR", "GBP",
    "HKD", "HUF", "IDR", "ILS", "INR", "ISK", "JPY", "KRW", "MAD", "MXN", "MYR", "NGN", "NOK",
    "NZD", "PHP", "PLN", "RON", "RSD", "SAR", "SEK", "SGD", "THB", "TRY", "TWD", "UAH", "USD",
    "VND", "ZAR",
)
# fmt: on
# What a sign stands for, and how sure that is: many countries have dollars and crowns.
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
# Any word of its shape: a look into the tables is faster than seventy alternatives.
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
LONGEST_AMOUNT = 48
MAX_SIGNS = 2_000


@dataclass(frozen=True, slots=True)
class Amount:
    """A number in a text. `is_exact` if it has the two decimals that money has."""

    value: float
    is_exact: bool
    is_money: bool
    """It has them, or a currency stands beside it."""


def decimal_sign(text: str) -> str:
    """What separates the cents in this text; the point, where it has no cents."""
    found = Counter(_CENTS.findall(text))
    return "," if found[","] > found["."] else "."


def number(text: str, decimal: str = ".") -> float | None:
    """The value of a number however it is grouped; None for a date, a version or an address."""
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
    """The amount that this cell is; None if it is anything else."""
    if len(cell) > LONGEST_AMOUNT:
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
    """`Total due: EUR 12.50` as the words and the amount behind them."""
    text = text.rstrip()
    tail = text[-LONGEST_AMOUNT:]
    found = _AT_THE_END.search(tail)
    if found is None:
        return text, None
    it = amount(found[0], decimal)
    if it is None:
        return text, None
    return text[: len(text) - len(found[0])].rstrip(" :"), it


def currency_of(text: str) -> tuple[str | None, float]:
    """The currency that most amounts of a text are in, and how sure that is."""
    # What stands beside a number counts; what is only mentioned counts little.
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
        # A sign and its code together leave nothing open.
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
    # By name where two have as many: the same text gives the same answer.
    (code, most), *others = sorted(votes.items(), key=lambda pair: (-pair[1], pair[0]))
    share = most / (most + others[0][1]) if others else 1.0
    return code, round(surest[code] * min(1.0, 0.4 + 0.7 * share), 4)
