"""A run as text, with an earlier one beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import log

from kvshm.bench.results import Cost, Run, Transfer
from kvshm.units import format_nbytes

__all__ = ["describe"]


def describe(run: Run, before: Run | None = None) -> str:
    """The run as tables; with an earlier one, what it had and how that changed."""
    machine = run.machine
    lines = [
        f"kvshm {machine['kvshm']}, Python {machine['python']}, NumPy {machine['numpy']}, {machine['libc']}",
        f"{machine['processor']}, {machine['cpus']} CPUs, {machine['system']}, load {machine.get('load')}",
    ]
    for part in (_transfers(run, before), _costs(run, before), _amounts(run, before)):
        if len(part) > 1:
            lines += ["", *_aligned(part)]
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns of equal width, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *others]).rstrip()


def _transfers(run: Run, before: Run | None) -> list[list[str]]:
    old = {row.key: row for row in before.transfers} if before else {}
    head = ["transfer", "threads", "moved", "gather", "copyto", "ratio", "scatter", "copyto", "ratio"]
    rows = [head + (["gather before", "scatter before"] if before else [])]
    for (layout, num_threads), group in groupby(run.transfers, lambda row: (row.layout, row.num_threads)):
        row = [f"{layout}", str(num_threads)]
        earlier = []
        for transfer in group:
            if len(row) == 2:
                row[0] += f" {transfer.shape}"
                row.append(format_nbytes(transfer.nbytes))
            row += [_speed(transfer, transfer.seconds), _speed(transfer, transfer.copyto_seconds), _ratio(transfer)]
            found = old.get(transfer.key)
            earlier.append(_ratio(found) if found else "-")
        rows.append(row + (earlier if before else []))
    return rows


def _speed(transfer: Transfer, seconds: float) -> str:
    return f"{transfer.nbytes / seconds / 1e9:.2f} GB/s"


def _ratio(transfer: Transfer) -> str:
    return f"{transfer.ratio:.2f}"


def _costs(run: Run, before: Run | None) -> list[list[str]]:
    old = {cost.key: cost for cost in before.costs} if before else {}
    rows = [["cost", "size", "time", "per unit", "grows as"] + (["before", "change"] if before else [])]
    for series in run.series():
        for index, cost in enumerate(series):
            growth = _growth(series[0], cost) if index and index == len(series) - 1 else ""
            size = _size(cost) if cost.unit or len(series) > 1 else ""
            per_unit = f"{_time(cost.seconds / cost.size)}/{cost.unit}" if cost.unit else ""
            row = ["" if index else cost.name, size, _time(cost.seconds), per_unit, growth]
            if before:
                found = old.get(cost.key)
                row += [_time(found.seconds), f"{cost.seconds / found.seconds:.2f}x"] if found else ["-", "-"]
            rows.append(row)
    return rows


def _size(cost: Cost) -> str:
    plural = "s" if cost.unit.islower() and cost.size > 1 else ""
    return f"{cost.size:,} {cost.unit}{plural}".strip()


def _growth(first: Cost, last: Cost) -> str:
    """The power of the size with which the time grows, from one end of a series to the other."""
    if first.size == last.size:
        return ""
    return f"n^{log(last.seconds / first.seconds) / log(last.size / first.size):.2f}"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _amounts(run: Run, before: Run | None) -> list[list[str]]:
    old = {amount.key: amount for amount in before.amounts} if before else {}
    rows = [["memory, server", "amount"] + (["before"] if before else [])]
    for amount in run.amounts:
        row = [amount.name, f"{amount.value:,.3g} {amount.unit}"]
        if before:
            found = old.get(amount.key)
            row.append(f"{found.value:,.3g} {found.unit}" if found else "-")
        rows.append(row)
    return rows
