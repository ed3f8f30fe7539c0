"""Tables that a simulation fills row by row and that become pandas frames at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


class Table:
    """Named, typed columns. `append` takes one value a column, in order; types are numpy dtype names or "string"."""

    def __init__(self, name: str, columns: dict[str, str]) -> None:
        self.name = name
        self.columns = columns
        self.rows: list[Sequence[Any]] = []
        self.append = self.rows.append  # one method call less in the hot path

    def __len__(self) -> int:
        return len(self.rows)

    def frame(self) -> pd.DataFrame:
        """The rows as a DataFrame whose columns have exactly the declared types, also when it is empty."""
        import pandas as pd

        values: Sequence[Sequence[Any]] = list(zip(*self.rows, strict=True)) if self.rows else [()] * len(self.columns)
        return pd.DataFrame({
            name: pd.Series(value, dtype=dtype) for (name, dtype), value in zip(self.columns.items(), values, strict=True)
        })


class Recorder:
    """The tables of one run, by name."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}

    def table(self, name: str, columns: dict[str, str]) -> Table:
        """Declare a table. Raises ValueError if the name is taken."""
        if name in self.tables:
            raise ValueError(f"table {name!r} exists already")
        self.tables[name] = Table(name, columns)
        return self.tables[name]

    def frames(self) -> dict[str, pd.DataFrame]:
        return {name: table.frame() for name, table in self.tables.items()}
