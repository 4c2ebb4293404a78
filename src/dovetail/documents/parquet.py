"""What was found in a document, as the bytes of a Parquet file with one row.

The same content gives the same bytes, so a rerun changes no file. What it must not know: where
the file goes.
"""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from functools import cache
from typing import Any

from dovetail import PermanentError

_DIGITS = 38
_DECIMALS = 9


@cache
def schema() -> Any:
    """The columns. `document_type` and not `type`: that is the partition's, and readers that take
    partitions from the path refuse a file with a column of the same name."""
    import pyarrow as pa  # type: ignore[import-untyped]

    # 38 digits, 9 of them decimals, is NUMERIC in BigQuery and DECIMAL(38, 9) elsewhere: exact
    # amounts in every currency, and unit prices and quantities that need more than four places.
    money = pa.decimal128(_DIGITS, _DECIMALS)
    item = pa.struct(
        [
            pa.field("description", pa.string()),
            pa.field("quantity", money),
            pa.field("unit_price", money),
            pa.field("amount", money),
        ]
    )
    return pa.schema(
        [
            pa.field("document_id", pa.string(), nullable=False),
            pa.field("file_path", pa.string(), nullable=False),
            pa.field("sha256", pa.string(), nullable=False),
            pa.field("kind", pa.string(), nullable=False),
            pa.field("pages", pa.int32()),
            pa.field("characters", pa.int64()),
            pa.field("document_type", pa.string(), nullable=False),
            pa.field("vendor", pa.string()),
            pa.field("date", pa.date32()),
            pa.field("currency", pa.string()),
            pa.field("total", money),
            pa.field("line_items", pa.list_(item), nullable=False),
            pa.field("confidence", pa.float64(), nullable=False),
            pa.field("confidences", pa.map_(pa.string(), pa.float64()), nullable=False),
            pa.field("extractor", pa.string(), nullable=False),
            pa.field("warnings", pa.list_(pa.string()), nullable=False),
        ]
    )


def parquet_bytes(found: dict[str, Any]) -> bytes:
    """One row, as a whole file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise PermanentError(
            f"Parquet files need pyarrow ({error}): pip install 'dovetail[documents]'",
            type="not_installed",
        ) from None
    table = pa.Table.from_pylist([_row(found)], schema=schema())
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="snappy", use_dictionary=False, store_schema=False)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _row(found: dict[str, Any]) -> dict[str, Any]:
    day = found["date"]
    return {
        **{name: found[name] for name in ("document_id", "file_path", "sha256", "kind")},
        **{name: found[name] for name in ("pages", "characters", "vendor", "currency")},
        **{name: found[name] for name in ("confidence", "extractor", "warnings")},
        "document_type": found["type"],
        "date": None if day is None else date.fromisoformat(day),
        "total": _exact(found["total"]),
        "line_items": [
            {
                "description": item["description"],
                "quantity": _exact(item["quantity"]),
                "unit_price": _exact(item["unit_price"]),
                "amount": _exact(item["amount"]),
            }
            for item in found["line_items"]
        ],
        "confidences": sorted(found["confidences"].items()),
    }


def _exact(number: float | None) -> Decimal | None:
    """The number as it is written, not the binary fraction nearest to it."""
    if number is None:
        return None
    return round(Decimal(repr(number)), _DECIMALS)
