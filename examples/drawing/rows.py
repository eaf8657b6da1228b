"""The data of a figure: a list of rows, each a line of its CSV file, columns by name."""

import csv
import io
import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def pick(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows with given values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def mean(rows: Sequence[Row], value: str, **wanted: Any) -> float | None:
    """The mean of a column over the rows with given values, None where there are none."""
    found = [row[value] for row in pick(rows, **wanted)]
    return statistics.fmean(found) if found else None


def spread(rows: Sequence[Row], value: str, **wanted: Any) -> float:
    """The standard deviation of a column, divided by the number of rows; 0 for none."""
    found = [row[value] for row in pick(rows, **wanted)]
    return statistics.pstdev(found) if found else 0.0


def unique(rows: Sequence[Row], column: str) -> list[Any]:
    """The values in a column, in the order of the rows."""
    return list(dict.fromkeys(row[column] for row in rows))


def mean_over_seeds(rows: Sequence[Row], values: Sequence[str]) -> list[Row]:
    """Rows without their seed: the means of the measured columns over the seeds."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        rest = tuple(item for item in row.items() if item[0] not in ("seed", *values))
        groups.setdefault(rest, []).append(row)
    return [
        {**dict(rest), "seeds": len(own), **{v: mean(own, v) for v in values}}
        for rest, own in groups.items()
    ]


def comma_separated(rows: Sequence[Row]) -> str:
    """CSV, floats with six digits."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return out.getvalue()
