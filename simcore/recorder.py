"""Tables that a simulation fills row by row and that become pandas frames at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


class Table:
    """Named, typed columns. `append` takes one value a column, in order; types are numpy dtype names or "string".

    `pack` turns the rows so far into typed columns, which take a tenth of the memory; a long run does so now and then.
    """

    def __init__(self, name: str, columns: dict[str, str], order: Sequence[str] = ()) -> None:
        self.name = name
        self.columns = columns
        self.order = tuple(order)  # columns that the frame is sorted by; none = as appended
        self._rows: list[Sequence[Any]] = []
        self._packed: list[list[Any]] = []
        self._packed_rows = 0
        self.append = self._rows.append  # one method call less in the hot path

    def __len__(self) -> int:
        return self._packed_rows + len(self._rows)

    def pack(self) -> None:
        """Raises ValueError for rows of unequal length, TypeError for a value that its column's type would change."""
        if not self._rows and self._packed:
            return
        values: Sequence[Sequence[Any]] = list(zip(*self._rows, strict=True)) if self._rows else [()] * len(self.columns)
        self._packed.append([_typed(value, dtype) for dtype, value in zip(self.columns.values(), values, strict=True)])
        self._packed_rows += len(self._rows)
        self._rows.clear()

    def frame(self) -> pd.DataFrame:
        """The rows as a DataFrame whose columns have exactly the declared types, also when it is empty. The table is empty
        afterwards: the frame has it all, and a long run need not hold it twice."""
        import numpy as np
        import pandas as pd

        self.pack()
        columns: dict[str, Any] = {}
        for k, (name, dtype) in enumerate(self.columns.items()):
            parts = [part[k] for part in self._packed]
            for part in self._packed:
                part[k] = None
            if len(parts) > 1:
                parts = [pd.concat([pd.Series(part) for part in parts], ignore_index=True).array if dtype == "string"
                         else np.concatenate(parts)]
            columns[name] = parts[0]
        if self.order:
            place = np.lexsort([columns[name] for name in reversed(self.order)])
            if (np.diff(place) < 0).any():
                columns = {name: column[place] for name, column in columns.items()}
        self._packed, self._packed_rows = [], 0
        return pd.DataFrame(columns, copy=False)


def _typed(values: Sequence[Any], dtype: str) -> Any:
    import numpy as np
    import pandas as pd

    if dtype == "string":
        return pd.array(values, dtype="string")
    return np.array(values).astype(dtype, casting="same_kind") if len(values) else np.zeros(0, dtype)


class Recorder:
    """The tables of one run, by name."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}

    def table(self, name: str, columns: dict[str, str], order: Sequence[str] = ()) -> Table:
        """Declare a table. Raises ValueError if the name is taken."""
        if name in self.tables:
            raise ValueError(f"table {name!r} exists already")
        self.tables[name] = Table(name, columns, order)
        return self.tables[name]

    def pack(self) -> None:
        for table in self.tables.values():
            table.pack()

    def frames(self) -> dict[str, pd.DataFrame]:
        return {name: table.frame() for name, table in self.tables.items()}
