"""Where in the pool a chunk object lies: offsets, and which objects may go when room is needed.

Pure bookkeeping over byte offsets; no memory is touched. The pool is divided into granules. A slab is a run of granules
that holds cells of one size::

    granule  |0   |1   |2   |3   |4   |5   |6   |7   |
    slab     |A: 3 cells of 85 KiB    |free|B: 1 cell|free|

Cells of one size are interchangeable, so objects of one layout never fragment the pool. When a layout goes out of use,
its slabs are given over whole to the next one, the coldest neighbourhood first.

A cell is busy from :meth:`SlabAllocator.take` on, until :meth:`~SlabAllocator.rest`; only resting cells are proposed
for eviction. Not thread-safe: it belongs to one thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

__all__ = ["CELL_ALIGNMENT", "Cell", "SlabAllocator"]

CELL_ALIGNMENT = 64  # bytes: a cache line, and a multiple of every item size
_MAX_GRANULES = 4096  # bounds the search for a window
_MAX_SLAB_GRANULES = 64
_MAX_WASTE = 1 / 64  # share of a slab that may stay unused
_SLACK_SHARE = 16
_MAX_SLACK_NBYTES = 1 << 20


@dataclass(slots=True, eq=False)
class Cell:
    """Room for one object."""

    offset: int  # bytes from the pool's start
    nbytes: int
    slab: _Slab
    last_use: int = 0  # tick of the allocator's clock


@dataclass(slots=True, eq=False)
class _Slab:
    start: int  # granules
    num_granules: int
    size_class: _SizeClass
    free: list[Cell]
    used: set[Cell] = field(default_factory=set)
    num_busy: int = 0
    last_use: int = 0


@dataclass(slots=True, eq=False)
class _SizeClass:
    cell_nbytes: int
    cells_per_slab: int
    num_granules: int  # per slab
    open: dict[_Slab, None] = field(default_factory=dict)  # slabs with a free cell
    slabs: OrderedDict[_Slab, None] = field(default_factory=OrderedDict)  # coldest first
    resting: OrderedDict[Cell, None] = field(default_factory=OrderedDict)  # coldest first


class SlabAllocator:
    """Hands out cells of a pool of ``capacity`` bytes; ``nbytes`` is what the pool needs.

    That is a little more than the capacity, so that a pool for n objects of any size holds n, aligned as they are.

    >>> allocator = SlabAllocator(1 << 20)
    >>> cell = allocator.take(1000)
    >>> cell.offset, cell.nbytes
    (0, 1024)
    """

    def __init__(self, capacity: int) -> None:
        granule = CELL_ALIGNMENT
        while granule * _MAX_GRANULES < capacity:
            granule *= 2
        num_granules = -(-(capacity + min(capacity // _SLACK_SHARE, _MAX_SLACK_NBYTES)) // granule)
        self.granule = granule
        self.nbytes = num_granules * granule
        self.busy_nbytes = 0
        self.used_nbytes = 0
        self._map = bytearray(num_granules)  # 1: belongs to a slab
        self._slab_at: list[_Slab | None] = [None] * num_granules
        self._classes: dict[int, _SizeClass] = {}
        self._tick = 0

    def take(self, nbytes: int) -> Cell | None:
        """A busy cell of at least ``nbytes``, or None if something must go first."""
        size_class = self._size_class(nbytes)
        slab = next(iter(size_class.open), None) or self._new_slab(size_class)
        if slab is None:
            return None
        cell = slab.free.pop()
        if not slab.free:
            del size_class.open[slab]
        slab.used.add(cell)
        slab.num_busy += 1
        self.used_nbytes += cell.nbytes
        self.busy_nbytes += cell.nbytes
        return cell

    def give(self, cell: Cell) -> None:
        """Take a busy or resting cell back. An empty slab's granules are free for any size."""
        slab = cell.slab
        size_class = slab.size_class
        if cell in size_class.resting:
            del size_class.resting[cell]
        else:
            slab.num_busy -= 1
            self.busy_nbytes -= cell.nbytes
        slab.used.remove(cell)
        self.used_nbytes -= cell.nbytes
        slab.free.append(cell)
        if slab.used:
            size_class.open[slab] = None
            return
        size_class.open.pop(slab, None)
        del size_class.slabs[slab]
        self._map[slab.start : slab.start + slab.num_granules] = bytes(slab.num_granules)
        self._slab_at[slab.start] = None
        if not size_class.slabs:
            del self._classes[size_class.cell_nbytes]

    def hold(self, cell: Cell) -> None:
        """Make a resting cell busy."""
        del cell.slab.size_class.resting[cell]
        cell.slab.num_busy += 1
        self.busy_nbytes += cell.nbytes

    def rest(self, cell: Cell) -> None:
        """Make a busy cell resting, as the one used last."""
        slab = cell.slab
        slab.num_busy -= 1
        self.busy_nbytes -= cell.nbytes
        self._tick += 1
        cell.last_use = slab.last_use = self._tick
        slab.size_class.resting[cell] = None
        slab.size_class.slabs.move_to_end(slab)

    def fits(self, sizes: list[int]) -> bool:
        """Whether cells of these sizes could exist beside the busy ones. Necessary, not sufficient."""
        return sum(map(_round_up, sizes)) <= self.nbytes - self.busy_nbytes

    def make_room(self, nbytes: int) -> list[Cell] | None:
        """Resting cells that must be given back before :meth:`take` finds room; None if nothing helps.

        The coldest cell of the same size goes first, unless a whole neighbourhood of other sizes is colder still.
        """
        size_class = self._size_class(nbytes)
        own = next(iter(size_class.resting), None)
        if own is not None and not self._is_foreign_colder(size_class, own.last_use):
            return [own]
        window = self._coldest_window(size_class.num_granules, own.last_use if own else None)
        if window is None:
            return None if own is None else [own]
        return [cell for slab in window for cell in slab.used]

    def _is_foreign_colder(self, size_class: _SizeClass, last_use: int) -> bool:
        for other in self._classes.values():
            if other is size_class:
                continue
            coldest = next((slab for slab in other.slabs if not slab.num_busy), None)
            if coldest is not None and coldest.last_use < last_use:
                return True
        return False

    def _coldest_window(self, num_granules: int, before: int | None) -> list[_Slab] | None:
        """The slabs over the run of granules whose last use lies furthest back (and before ``before``)."""
        best: list[_Slab] | None = None
        window: deque[tuple[int, int, _Slab | None]] = deque()  # start, granules, slab
        covered = 0
        start = 0
        while start < len(self._map):
            slab = self._slab_at[start]
            length = slab.num_granules if slab else 1
            if slab and slab.num_busy:
                window.clear()
                covered = 0
            else:
                window.append((start, length, slab))
                covered += length
                while covered - window[0][1] >= num_granules:
                    covered -= window.popleft()[1]
                if covered >= num_granules:
                    slabs = [slab for _, _, slab in window if slab]
                    last_use = max((slab.last_use for slab in slabs), default=0)
                    if before is None or last_use < before:
                        before = last_use
                        best = slabs
            start += length
        return best

    def _size_class(self, nbytes: int) -> _SizeClass:
        cell_nbytes = _round_up(nbytes)
        size_class = self._classes.get(cell_nbytes)
        if size_class is None:
            num_granules = self._slab_granules(cell_nbytes)
            cells = num_granules * self.granule // cell_nbytes
            size_class = _SizeClass(cell_nbytes, cells, num_granules)
        return size_class

    def _slab_granules(self, cell_nbytes: int) -> int:
        """The shortest slab that wastes little of itself."""
        least = -(-cell_nbytes // self.granule)
        best, best_waste = least, 1.0
        for num_granules in range(least, max(least, min(_MAX_SLAB_GRANULES, len(self._map) // 8)) + 1):
            nbytes = num_granules * self.granule
            waste = nbytes % cell_nbytes / nbytes
            if waste < best_waste:
                best, best_waste = num_granules, waste
            if waste <= _MAX_WASTE:
                break
        return best

    def _new_slab(self, size_class: _SizeClass) -> _Slab | None:
        start = self._map.find(bytes(size_class.num_granules))
        if start < 0:
            return None
        self._classes[size_class.cell_nbytes] = size_class
        self._map[start : start + size_class.num_granules] = b"\1" * size_class.num_granules
        slab = _Slab(start, size_class.num_granules, size_class, [])
        base = start * self.granule
        slab.free = [
            Cell(base + index * size_class.cell_nbytes, size_class.cell_nbytes, slab)
            for index in reversed(range(size_class.cells_per_slab))
        ]
        self._slab_at[start] = slab
        size_class.open[slab] = None
        size_class.slabs[slab] = None
        return slab


def _round_up(nbytes: int) -> int:
    return -(-max(nbytes, 1) // CELL_ALIGNMENT) * CELL_ALIGNMENT
