"""What the rules find, in the samples and in what people write; and that nothing is slow."""

from __future__ import annotations

import io
import random
import runpy
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dovetail.documents.fields import Fields, json_schema, overall
from dovetail.documents.reading import MAX_TEXT_LENGTH, read
from dovetail.documents.rules import amount, currency_of, day_of, decimal_sign, fields_of, number

SAMPLES = Path(__file__).parents[2] / "examples" / "documents"

Item = tuple[str, float | None, float | None, float | None]


def items_of(fields: Fields) -> list[Item]:
    return [(i.description, i.quantity, i.unit_price, i.amount) for i in fields.line_items]


def found_in(text: str) -> dict[str, Any]:
    fields = fields_of(text)
    return {name: getattr(fields, name) for name in ("type", "vendor", "date", "currency", "total")}


EXPECTED: dict[str, tuple[tuple[Any, ...], list[Item]]] = {
    "invoice.pdf": (
        ("invoice", "Northwind Paper & Ink Ltd", "2026-03-16", "GBP", 621.36),
        [
            ("Copy paper A4, 80 g/m², box of 5 reams", 12, 18.4, 220.8),
            ("Ink cartridge, black, high yield", 3, 31.5, 94.5),
            ("Envelopes C5, self-seal, pack of 500", 4, 27.25, 109),
            ("Desk organiser, oak", 2, 42, 84),
        ],
    ),
    "rechnung.docx": (
        ("invoice", "Tischlerei Eichinger GmbH & Co. KG", "2026-04-28", "EUR", 6164.2),
        [
            ("Einbauschrank Eiche, nach Maß", 1, 2480, 2480),
            ("Türblatt, furniert, inkl. Zarge", 4, 385.5, 1542),
            ("Montage vor Ort", 16.5, 62, 1023),
            ("Anfahrt", 3, 45, 135),
        ],
    ),
    "receipt.html": (
        ("receipt", "Bramble & Finch Bookshop", "2026-02-14", "EUR", 37.99),
        [
            ("The Salt Path (paperback)", 1, 11.99, 11.99),
            ("Notebook, dotted, A5", 3, 6.5, 19.5),
            ("Greeting card", 2, 3.25, 6.5),
        ],
    ),
    "kassenbon.txt": (
        ("receipt", "Café Morgenrot", "2026-05-02", "EUR", 33.1),
        [
            ("Cappuccino", 2, None, 7.6),
            ("Frühstück Morgenrot", 1, None, 12.9),
            ("Orangensaft 0,3 l", 1, None, 4.2),
            ("Croissant", 2, None, 5.4),
        ],
    ),
    "agreement.pdf": (("contract", "Larkspur Analytics LLC", "2026-01-09", None, None), []),
    "scribbled.txt": (("other", "Hoffmann & daughter, gardening", "2026-04-03", None, None), []),
}


class TestTheSamples:
    def test_equal_the_output_of_their_tool(self, monkeypatch):
        monkeypatch.setattr(sys, "path", sys.path[:])  # to which the tool adds
        tool = runpy.run_path(str(SAMPLES.parents[1] / "tools" / "sample_documents.py"))
        made: dict[str, bytes] = tool["samples"]()
        here = {path.name: path.read_bytes() for path in SAMPLES.iterdir()}
        assert set(here) == set(made) == set(EXPECTED)
        for name, content in made.items():
            # By what is in the archive: how well it is packed depends on the machine.
            assert _contents(here[name]) == _contents(content), f"{name}: make it again"
        assert tool["LONG"].read_bytes() == tool["long_invoice"]()

    @pytest.mark.parametrize("name", EXPECTED)
    def test_are_extracted_correctly(self, name):
        fields = fields_of(read(SAMPLES / name).text)
        facts, items = EXPECTED[name]
        assert (
            fields.type,
            fields.vendor,
            fields.date,
            fields.currency,
            fields.total,
        ) == facts
        assert items_of(fields) == items

    def test_are_confident_except_the_sample_for_a_person(self):
        sure = {name: fields_of(read(SAMPLES / name).text).confidence for name in EXPECTED}
        assert [name for name, confidence in sure.items() if confidence < 0.8] == ["scribbled.txt"]


def _contents(document: bytes) -> dict[str, bytes]:
    if not document.startswith(b"PK"):
        return {"": document}
    with zipfile.ZipFile(io.BytesIO(document)) as package:
        return {name: package.read(name) for name in package.namelist()}


# --- documents of other people -----------------------------------------------------------------

INVOICE = """\
ACME Web Services, Inc.
123 Market St, San Francisco, CA 94103

INVOICE

Invoice #: 10023
Date: 03/15/2026
Due: 04/14/2026

Bill To:
Globex Corporation
742 Evergreen Terrace

Description                Hours    Rate      Amount
Website redesign           40       $95.00    $3,800.00
Hosting (monthly)          1        $49.99    $49.99

Subtotal   $3,849.99
Sales Tax (8.5%)   $327.25
TOTAL   $4,177.24
"""

SUPERMARKET = """\
       Kornblume Markt GmbH
      Musterstr. 5
      10115 Berlin
                          EUR
BIO BANANEN              1,79 B
JOGHURT NATUR            0,87 B
   3 Stk x    0,29
PFAND                    0,25 A *
--------------------------------
SUMME           EUR      2,91
================================
Geg. BAR        EUR      5,00
Rückgeld BAR    EUR      2,09
Steuer  %    Netto   Steuer  Brutto
A= 19,0%     0,21     0,04    0,25
B=  7,0%     2,49     0,17    2,66
Gesamtbetrag 2,70     0,21    2,91
Datum: 12.01.2026   Uhrzeit: 17:33:07
Bon-Nr.:4711
"""

LETTER = """\
Stadtwerke Musterstadt AG
Postfach 1234
12345 Musterstadt

Herrn
Max Beispiel
Am Weg 3

Musterstadt, den 3. März 2026

Betreff: Ihre Anfrage vom 14.02.2026

Sehr geehrter Herr Beispiel,

vielen Dank für Ihr Schreiben zur Rechnung. Die Kosten betragen 120,00 EUR.

Mit freundlichen Grüßen
i.A. Petra Muster
"""

LEASE = """\
Mietvertrag

zwischen
Hausverwaltung Sonnenschein GmbH, Berliner Str. 1, Potsdam
(nachfolgend Vermieter)
und
Frau Erika Muster
(nachfolgend Mieter)

§ 1 Mietsache
Die Miete beträgt monatlich 850,00 EUR.
Potsdam, den 01.02.2026
"""

TWO_COLUMNS = """\
INVOICE
From\tBill To
Pixel Forge Studio\tDelta Air Parts LLC
Invoice Date\tFeb 3, 2026
Item\tPrice\tQty\tTotal
Logo design\t€400.00\t1\t€400.00
Gift card\t€25.00\t8\t€200.00
Total\t\t€600.00
"""


def test_an_american_invoice_has_its_month_first_and_its_recipient_is_not_the_vendor():
    fields = fields_of(INVOICE)
    assert found_in(INVOICE) == {
        "type": "invoice",
        "vendor": "ACME Web Services, Inc.",
        "date": "2026-03-15",
        "currency": "USD",
        "total": 4177.24,
    }
    assert items_of(fields) == [
        ("Website redesign", 40, 95, 3800),
        ("Hosting (monthly)", 1, 49.99, 49.99),
    ]


def test_a_receipt_reads_quantities_from_the_line_below():
    fields = fields_of(SUPERMARKET)
    assert found_in(SUPERMARKET) == {
        "type": "receipt",
        "vendor": "Kornblume Markt GmbH",
        "date": "2026-01-12",
        "currency": "EUR",
        "total": 2.91,
    }
    assert items_of(fields) == [
        ("BIO BANANEN", None, None, 1.79),
        ("JOGHURT NATUR", 3, 0.29, 0.87),
        ("PFAND", None, None, 0.25),
    ]
    assert fields.confidences.line_items > 0.9, "the sum is the total"


def test_a_letter_about_an_invoice_is_a_letter_and_has_no_total():
    assert found_in(LETTER) == {
        "type": "letter",
        "vendor": "Stadtwerke Musterstadt AG",
        "date": "2026-03-03",
        "currency": None,
        "total": None,
    }


def test_the_vendor_of_a_contract_is_its_first_party():
    found = found_in(LEASE)
    assert (found["type"], found["vendor"]) == ("contract", "Hausverwaltung Sonnenschein GmbH")
    assert found["date"] == "2026-02-01"


def test_columns_are_separated_and_items_named_like_payments_are_items():
    fields = fields_of(TWO_COLUMNS)
    assert (fields.vendor, fields.date) == ("Pixel Forge Studio", "2026-02-03")
    assert items_of(fields) == [("Logo design", 1, 400, 400), ("Gift card", 8, 25, 200)]


def test_a_book_with_every_keyword_has_the_type_other():
    words = "paid by visa at the terminal, a receipt for the table, cash and change, an invoice"
    book = "A short history of money\n\n" + "long ago nobody was " * 900 + words + " yet" * 2000
    assert found_in(book)["type"] == "other"


def test_a_meaningless_text_gives_no_fields():
    fields = fields_of("x")
    assert (fields.type, fields.vendor, fields.total, fields.line_items) == (
        "other",
        None,
        None,
        [],
    )
    assert fields.confidence < 0.3


# --- totals ------------------------------------------------------------------------------------


def total_of(*lines: str) -> tuple[float | None, float]:
    fields = fields_of("\n".join(["Foo Ltd", "Invoice no. 1", "Date: 2026-01-05", *lines]))
    return fields.total, fields.confidences.total


@pytest.mark.parametrize(
    ("lines", "total"),
    [
        (["Subtotal 100.00", "VAT 20% 20.00", "Total 120.00"], 120),
        (["Total excl. VAT 100.00", "VAT 20.00", "Total incl. VAT 120.00"], 120),
        (["Net total 100.00", "Grand total: $120.00"], 120),
        (["Zwischensumme 100,00", "zzgl. 19 % MwSt. 19,00", "Gesamtbetrag 119,00 €"], 119),
        (["Summe netto 100,00 EUR", "MwSt 19,00 EUR", "Summe brutto 119,00 EUR"], 119),
        (["Nettobetrag\t1.000,00", "USt. 19%\t190,00", "Rechnungsbetrag\t1.190,00"], 1190),
        (["Total HT 180,00 €", "TVA 20 % 36,00 €", "Total TTC 216,00 €"], 216),
        (["TOTAL", "€ 45.60"], 45.6),
        (["Amount due (EUR): 1,234.56"], 1234.56),
        (["Zu zahlender Betrag 45,-", "zu zahlen 45,00 €"], 45),
        (["Total items: 3", "Total 12.00", "Cash 20.00", "Change 8.00"], 12),
        (
            ["Sail repair  1  300,00  300,00", "Total 300,00", "Paid 100,00", "Amount due 200,00"],
            300,
        ),
        (["Total tax 20.00", "Total 120.00"], 120),
        (["Beratung\t2\t10,00\t20,00", "Rabatt 10%\t-2,00", "Gesamtbetrag\t18,00"], 18),
        (["Total\tCHF 1'740.50"], 1740.5),
        (["Consulting\t10 h\t1 250,00\t12 500,00", "Total SEK\t12 500,00"], 12500),
    ],
)
def test_the_total_is_the_amount_to_pay(lines, total):
    assert total_of(*lines)[0] == total


def test_a_total_that_adds_up_has_a_higher_confidence():
    _, adding = total_of("Subtotal 100.00", "VAT 20.00", "Total 120.00")
    _, alone = total_of("Total 120.00")
    _, wrong = total_of("Subtotal 100.00", "VAT 20.00", "Total 210.00")
    _, largest = total_of("we would like 120.00 EUR")
    assert adding > alone > wrong > largest > 0


def test_line_items_that_add_up_to_the_total_have_a_higher_confidence():
    right = fields_of("Foo Ltd\nInvoice 1\nTea  2  3.00  6.00\nCup  1  4.00  4.00\nTotal 10.00")
    wrong = fields_of("Foo Ltd\nInvoice 1\nTea  2  3.00  6.00\nCup  1  4.00  4.00\nTotal 99.00")
    assert right.confidences.line_items > 0.9 > 0.7 > wrong.confidences.line_items
    assert right.confidences.total > 0.9 > 0.85 >= wrong.confidences.total


# --- numbers, money, days ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "decimal", "value"),
    [
        ("1.234,56", ".", 1234.56),
        ("1,234.56", ",", 1234.56),
        ("1'234.50", ".", 1234.5),
        ("1 234,50", ",", 1234.5),
        ("12.345.678,9", ".", 12345678.9),
        ("1,234,567", ".", 1234567),
        ("1234", ".", 1234),
        ("0,5", ".", 0.5),
        ("0.125", ",", 0.125),
        ("1.234", ",", 1234),
        ("1.234", ".", 1.234),
        ("12,50", ".", 12.5),
        ("31.12.2026", ".", None),
        ("192.168.10.1", ".", None),
        ("1,23,456.00", ".", None),
        ("99999999999999", ".", None),
        ("١٢", ".", None),
    ],
)
def test_a_number_is_read_in_its_local_format(text, decimal, value):
    assert number(text, decimal) == value


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("€ 12.50", 12.5),
        ("12,50 €", 12.5),
        ("EUR 12.50", 12.5),
        ("-12.50", -12.5),
        ("(12.50)", -12.5),
        ("12.50-", -12.5),
        ("45,-", 45),
        ("$1,200.00", 1200),
        ("7,60 A", 7.6),
        ("12", 12),
        ("19 %", None),
        ("A4", None),
        ("2026-03-31", None),
        ("12:30", None),
        ("12 Std.", None),
    ],
)
def test_an_amount_fills_a_whole_cell(cell, value):
    found = amount(cell, ".")
    assert (found.value if found else None) == value


def test_the_decimal_separator_is_the_one_that_the_text_uses():
    assert decimal_sign("1.000,00 and 2,50 but 3.99") == ","
    assert decimal_sign("1,000.00") == "."
    assert decimal_sign("no numbers") == "."


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Total 12,00 €", "EUR"),
        ("£12", "GBP"),
        ("$12.00", "USD"),
        ("CA$ 12.00", "CAD"),
        ("$12.00, all prices in AUD", "AUD"),
        ("100 kr. Beløb i DKK", "DKK"),
        ("CHF 12.00 (about 11 EUR)\nTotal CHF 30.00", "CHF"),
        ("12,00 zł", "PLN"),
        ("FOR ALL THE MEN", None),
        ("Europe", None),
    ],
)
def test_the_currency_is_the_one_of_most_amounts(text, code):
    assert currency_of(text)[0] == code


@pytest.mark.parametrize(
    "text",
    [
        "2026-03-31", "2026/03/31", "31.03.2026", "31.3.2026", "31.03.26", "31/03/2026",
        "03/31/2026", "31 March 2026", "31st of March 2026", "31. März 2026", "March 31, 2026",
        "Mar 31, 2026", "31-Mar-2026", "31 mars 2026", "31 de marzo de 2026", "31 Mar 26",
    ],
)  # fmt: skip
def test_a_date_is_found_in_every_spelling(text):
    assert day_of(f"Date: {text}")[0] == "2026-03-31"


@pytest.mark.parametrize("text", ["31.02.2026", "2026-13-01", "1.2.3.2026", "12:30", "00/00/2026"])
def test_an_invalid_date_is_none(text):
    assert day_of(text) == (None, 0.0)


def test_a_date_with_an_ambiguous_month_has_a_low_confidence():
    day, unsure = day_of("Date: 03/04/2026")
    assert day == "2026-04-03"
    assert day_of("Date: 03/04/2026", is_american=True)[0] == "2026-03-04"
    _, sure = day_of("Date: 03.04.2026")
    assert unsure < 0.6 < 0.9 < sure
    assert day_of("Date: 03/03/2026")[1] == sure


def test_another_date_in_the_text_resolves_an_ambiguous_date():
    assert day_of("Date: 03/04/2026, due 04/25/2026") == ("2026-03-04", 0.97)
    assert day_of("Date: 03/04/2026, due 25/04/2026") == ("2026-04-03", 0.97)


def test_the_date_of_issue_is_not_the_due_date():
    text = "Due date: 30.04.2026\nDelivery date 01.03.2026\nInvoice date: 31.03.2026"
    assert day_of(text) == ("2026-03-31", 0.97)
    assert day_of("Leistungszeitraum 01.02.2026 bis 28.02.2026\nDatum\n05.03.2026")[0] == (
        "2026-03-05"
    )


# --- the whole ---------------------------------------------------------------------------------


def test_the_weakest_field_limits_the_confidence_of_a_document():
    good = dict.fromkeys(("type", "vendor", "date", "currency", "total", "line_items"), 0.95)
    assert overall("invoice", good) == 0.95
    assert overall("invoice", {**good, "date": 0.5}) < 0.8
    assert overall("invoice", {**good, "line_items": 0.0}) > 0.8, "some have none"
    assert overall("letter", {**good, "total": 0.0, "currency": 0.0}) == 0.95


def test_the_schema_is_as_strict_as_endpoints_require():
    def objects(part: Any) -> list[dict[str, Any]]:
        below = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        own = [part] if isinstance(part, dict) and part.get("type") == "object" else []
        return own + [found for value in below for found in objects(value)]

    found = objects(json_schema())
    assert len(found) == 3
    for each in found:
        assert each["required"] == list(each["properties"])
        assert each["additionalProperties"] is False
    assert "default" not in str(found)


def hostile() -> dict[str, str]:
    chance = random.Random(7)
    words = {
        "digits": "1", "points": "1.", "commas": ",1", "blanks": " ", "tabs": "a\t",
        "short lines": "1\n", "totals": "Total 1.00\n", "days": "03/04/2026 ",
        "days by name": "31 March 2026\n", "money": "€ 1", "codes": "EUR ", "brackets": "(",
        "parties": "between ", "firms": "GmbH & Co. KG ", "rows": "2 x Foo   1  2,50  5,00 A\n",
        "lines": "-", "pipes": "|", "quotes": "1'", "nets": "net total excl ", "letters": "a",
        "heads": "Description\tQty\tUnit price\tAmount\n", "senders": "from:\n", "title": "x-",
        "umlauts": "ä", "spaced": "1 000 ", "points alone": ".", "at": "a@", "minus": "- 1",
    }  # fmt: skip
    made = {name: (word * MAX_TEXT_LENGTH)[:MAX_TEXT_LENGTH] for name, word in words.items()}
    signs = "0123456789.,€ $EUR\n\tabTotal:-/x"
    made["noise"] = "".join(chance.choices(signs, k=MAX_TEXT_LENGTH))
    return made


@pytest.mark.parametrize(("name", "text"), hostile().items(), ids=hostile())
def test_hostile_text_takes_less_than_a_tenth_of_a_second(name, text):
    best = float("inf")
    for _ in range(5):  # the best of some: a busy machine says nothing about the rules
        start = time.process_time()
        fields_of(text)
        best = min(best, time.process_time() - start)
        if best < 0.1:
            break
    assert best < 0.1


def test_the_middle_of_a_very_long_text_is_not_read():
    text = "Foo Ltd\nInvoice 7\nDate: 2026-01-05\n" + "Tea  1  2.00  2.00\n" * 20_000
    longer = text + "Tea  1  2.00  2.00\n" * 20_000
    assert fields_of(text) == fields_of(longer)


def test_the_same_text_gives_the_same_fields():
    assert fields_of(INVOICE) == fields_of(INVOICE)


def test_the_fields_are_within_their_limits_for_any_text():
    chance = random.Random(3)
    pieces = [
        *INVOICE.split(), *SUPERMARKET.split(), *LETTER.split(), "\n", "\n", "\t", "  ", "€",
        "-1.00", "999999999999999", "1e9", "\u200b", "Total", "31.02.2026", "9" * 40, "(", "%",
    ]  # fmt: skip
    for _ in range(150):
        text = " ".join(chance.choices(pieces, k=120))
        fields = fields_of(text)
        assert Fields.model_validate(fields.model_dump()) == fields
