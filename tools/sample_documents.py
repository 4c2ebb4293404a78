"""Makes the sample documents in examples: people, firms and figures are invented.

    .venv/bin/python tools/sample_documents.py

The same bytes each time, so that they can be made again after a change. What the rules find in
them is in tests/documents/test_rules.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.documents.making import LEFT, RIGHT, Mark, docx, paragraph, pdf, row  # noqa: E402

FOLDER = ROOT / "examples" / "documents"
LONG = ROOT / "examples" / "long_invoice.pdf"

RECEIPT_HTML = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Your receipt</title>
<style>
body { font: 15px sans-serif; max-width: 32em }
td:nth-child(n+2) { text-align: right }
</style>
</head>
<body>
<h1>Bramble &amp; Finch Bookshop</h1>
<p>14 Quay Street, Galway<br>VAT no. IE 1234567T</p>
<h2>Receipt</h2>
<p>Receipt no. R-20418<br>Date: 14 February 2026, 16:42<br>Served by: Aoife</p>
<table>
<thead><tr><th>Item</th><th>Qty</th><th>Price</th><th>Amount</th></tr></thead>
<tbody>
<tr><td>The Salt Path (paperback)</td><td>1</td><td>€11.99</td><td>€11.99</td></tr>
<tr><td>Notebook, dotted, A5</td><td>3</td><td>€6.50</td><td>€19.50</td></tr>
<tr><td>Greeting card</td><td>2</td><td>€3.25</td><td>€6.50</td></tr>
</tbody>
<tfoot>
<tr><td colspan="3">Total</td><td>€37.99</td></tr>
<tr><td colspan="3">of which VAT 0 % and 23 %</td><td>€4.86</td></tr>
<tr><td colspan="3">Card payment, contactless</td><td>€37.99</td></tr>
</tfoot>
</table>
<p>Thank you for your visit!</p>
<script>window.print && console.log("receipt R-20418")</script>
</body>
</html>
"""

RECEIPT_TXT = """\
              Café Morgenrot
        Lindenallee 7, 04109 Leipzig
          Steuernummer 231/123/45678

Kassenbon                      Nr. 004711
02.05.2026 09:14               Tisch 6
Es bediente Sie: Jonas
------------------------------------------
2 x Cappuccino                   7,60 A
1 x Frühstück Morgenrot         12,90 A
1 x Orangensaft 0,3 l            4,20 A
2 x Croissant                    5,40 B
------------------------------------------
Zwischensumme                   30,10
Trinkgeld                        3,00
SUMME EUR                       33,10
------------------------------------------
Gegeben bar                     40,00
Rückgeld                         6,90

MwSt A 19 %   netto 20,76        3,94
MwSt B  7 %   netto  5,05        0,35

TSE-Signatur: 7f3a91c2
   Vielen Dank für Ihren Besuch!
"""

# Left out or left open on purpose: a person has to look at it.
SCRIBBLED_TXT = """\
Hoffmann & daughter, gardening
   (handwritten, copied by Lena)

03/04/2026

hedge, both sides      about 4 hrs
taking away cuttings       45
new roses, 6 pieces        78

comes to 203 or so, please transfer
thanks a lot!
"""


def invoice() -> bytes:
    items = [
        ("Copy paper A4, 80 g/m², box of 5 reams", "12", "18.40", "220.80"),
        ("Ink cartridge, black, high yield", "3", "31.50", "94.50"),
        ("Envelopes C5, self-seal, pack of 500", "4", "27.25", "109.00"),
        ("Desk organiser, oak", "2", "42.00", "84.00"),
    ]
    marks = [
        Mark(LEFT, 782, "Northwind Paper & Ink Ltd", 16, bold=True),
        Mark(LEFT, 766, "8 Tannery Lane, Bristol BS1 4QA", 9),
        Mark(LEFT, 754, "VAT no. GB 123 4567 89 · accounts@northwind.example", 9),
        Mark(RIGHT - 90, 782, "INVOICE", 20, bold=True),
        Mark(LEFT, 712, "Bill to", bold=True),
        Mark(LEFT, 698, "Harbour Street Studios"),
        Mark(LEFT, 684, "Unit 3, 21 Harbour Street"),
        Mark(LEFT, 670, "Plymouth PL1 2AB"),
    ]
    facts = [
        ("Invoice number", "NP-2026-0117"),
        ("Invoice date", "16 March 2026"),
        ("Due date", "15 April 2026"),
        ("Your order", "PO 4481"),
    ]
    for number, (name, value) in enumerate(facts):
        y = 712 - 14 * number
        marks += [Mark(340, y, name, bold=True), Mark(440, y, value)]
    columns = (LEFT, 360, 450, RIGHT)
    heads = ("Description", "Quantity", "Unit price", "Amount")
    marks += row(620, list(zip(columns, heads, strict=True)), bold=True)
    for number, cells in enumerate(items):
        marks += row(600 - 18 * number, list(zip(columns, cells, strict=True)))
    sums = [
        ("Subtotal", "508.30"),
        ("Delivery", "9.50"),
        ("VAT 20 %", "103.56"),
        ("Total due (GBP)", "£621.36"),
    ]
    for number, (name, value) in enumerate(sums):
        y, is_last = 510 - 18 * number, number == len(sums) - 1
        marks += [
            Mark(360, y, name, bold=is_last),
            Mark(RIGHT, y, value, bold=is_last, flush=True),
        ]
    marks += paragraph(
        400,
        "Please pay within 30 days to sort code 00-00-00, account 00000000, and quote the invoice "
        "number. Goods remain ours until they are paid for. Thank you for your business.",
    )
    return pdf([marks])


def rechnung() -> bytes:
    return docx(
        [
            "Tischlerei Eichinger GmbH & Co. KG\nGewerbestraße 12\n83043 Bad Aibling",
            "Rechnungsempfänger:\nPension Seeblick\nInhaberin Marta Vogl\nUferweg 3\n83209 Prien",
            [
                ["Rechnungsnummer", "2026-0342"],
                ["Rechnungsdatum", "28.04.2026"],
                ["Leistungszeitraum", "13.04.2026 bis 24.04.2026"],
                ["Kundennummer", "10077"],
            ],
            "Rechnung",
            "Sehr geehrte Frau Vogl,\nwir bedanken uns für Ihren Auftrag und berechnen wie folgt:",
            [
                ["Pos.", "Bezeichnung", "Menge", "Einzelpreis", "Gesamtpreis"],
                ["1", "Einbauschrank Eiche, nach Maß", "1", "2.480,00 €", "2.480,00 €"],
                ["2", "Türblatt, furniert, inkl. Zarge", "4", "385,50 €", "1.542,00 €"],
                ["3", "Montage vor Ort", "16,5 Std.", "62,00 €", "1.023,00 €"],
                ["4", "Anfahrt", "3", "45,00 €", "135,00 €"],
            ],
            "",
            [
                ["Nettobetrag", "5.180,00 €"],
                ["zzgl. 19 % MwSt.", "984,20 €"],
                ["Rechnungsbetrag", "6.164,20 €"],
            ],
            "Zahlbar innerhalb von 14 Tagen ohne Abzug, fällig am 12.05.2026.",
            "Mit freundlichen Grüßen\nKorbinian Eichinger",
        ],
        footer="Tischlerei Eichinger GmbH & Co. KG · IBAN DE00 0000 0000 0000 0000 00 · USt-IdNr. "
        "DE000000000",
    )


def contract() -> bytes:
    clauses = [
        "This Agreement is entered into on January 9, 2026 by and between Larkspur Analytics LLC, "
        '400 Mill Road, Portland, Oregon (hereinafter the "Consultant"), and Tidewater Orchards '
        'Inc, 77 Pier Avenue, Astoria, Oregon (hereinafter the "Client").',
        "1. Services. The Consultant shall analyse the Client's harvest data of the seasons 2023 "
        "to 2025 and deliver a written report with recommendations.",
        "2. Term and termination. This Agreement begins on February 1, 2026 and ends with the "
        "delivery of the report. Either party may terminate it with thirty days' written notice.",
        "3. Confidentiality. The parties shall keep what they learn of each other's business "
        "confidential for three years after the end of this Agreement.",
        "4. Governing law. This Agreement shall be governed by the laws of the State of Oregon.",
    ]
    marks = [Mark(LEFT, 772, "Consulting Agreement", 18, bold=True)]
    y = 730.0
    for clause in clauses:
        lines = paragraph(y, clause)
        marks += lines
        y -= 14 * len(lines) + 12
    marks += [
        Mark(LEFT, y - 30, "Ines Okafor, for the Consultant"),
        Mark(320, y - 30, "Paul Lindqvist, for the Client"),
    ]
    return pdf([marks])


def long_invoice() -> bytes:
    """An invoice of three pages: its head is on the first, its total on the last."""
    tools = ("Chisel", "Mallet", "Rasp", "Plane", "Try square", "Bradawl", "Spokeshave", "Clamp")
    columns = (LEFT, 360, 450, RIGHT)
    rows: list[tuple[str, str, str, str]] = []
    for number in range(40):
        count, price = 1 + number % 3, 8.5 + 1.25 * (number % 7)
        name = f"{tools[number % 8]}, {6 + 2 * (number // 8)} mm"
        rows.append((name, str(count), f"{price:.2f}", f"{count * price:.2f}"))
    net = sum(float(row[3]) for row in rows)
    head = ("Description", "Qty", "Unit price", "Amount")
    first = [
        Mark(LEFT, 790, "Harbour Tools Ltd", 18, bold=True),
        Mark(LEFT, 770, "3 Dock Lane, Whitby YO21 1AB"),
        Mark(LEFT, 735, "INVOICE", 14, bold=True),
        *row(710, [(LEFT, "Invoice number"), (RIGHT, "HT-2041")]),
        *row(694, [(LEFT, "Invoice date"), (RIGHT, "4 March 2026")]),
        *row(678, [(LEFT, "Bill to"), (RIGHT, "Morrow Joinery, Leeds")]),
        *row(640, list(zip(columns, head, strict=True)), bold=True),
    ]
    second = [
        Mark(LEFT, 790, "Invoice number HT-2041, page 2 of 3"),
        *row(760, list(zip(columns, head, strict=True)), bold=True),
    ]
    for place, cells in enumerate(rows):
        on, y = (first, 620) if place < 22 else (second, 740 + 22 * 24)
        on += row(y - 24 * place, list(zip(columns, cells, strict=True)))
    third = [
        Mark(LEFT, 790, "Invoice number HT-2041, page 3 of 3"),
        *row(750, [(LEFT, "Subtotal"), (RIGHT, f"{net:,.2f}")]),
        *row(730, [(LEFT, "VAT 20%"), (RIGHT, f"{0.2 * net:,.2f}")]),
        *row(706, [(LEFT, "Total due"), (RIGHT, f"£{1.2 * net:,.2f}")], bold=True),
        Mark(LEFT, 670, "Please pay within 30 days."),
    ]
    return pdf([first, second, third])


def samples() -> dict[str, bytes]:
    """Name and content of each in the folder of documents."""
    return {
        "invoice.pdf": invoice(),
        "rechnung.docx": rechnung(),
        "receipt.html": RECEIPT_HTML.encode(),
        "kassenbon.txt": RECEIPT_TXT.encode(),
        "agreement.pdf": contract(),
        "scribbled.txt": SCRIBBLED_TXT.encode(),
    }


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in samples().items():
        (FOLDER / name).write_bytes(content)
        sys.stdout.write(f"{name}: {len(content):,} bytes\n")
    LONG.write_bytes(long_invoice())


if __name__ == "__main__":
    main()
