"""The chunk store: which object is cached where, how often it is pinned, and what is evicted when room is needed.

An object is one chunk of one object group. It is either *unfinished* (its bytes are being written; nobody finds it) or
*visible*. A visible object may be pinned, by running copies and by lookups; only objects that are not pinned
are evicted, the least recently used first. A store of several objects reserves room for all of them or for none.

The store knows offsets in the pool, never bytes. Not thread-safe: it belongs to the server's loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvshm.store.slabs import Cell, SlabAllocator

__all__ = ["ChunkStore", "Entry", "Reservation", "StoreStats"]


@dataclass(slots=True, eq=False)
class Entry:
    """One object in the pool."""

    key: bytes
    nbytes: int
    cell: Cell
    ref_count: int
    is_visible: bool = False

    @property
    def offset(self) -> int:
        """Bytes from the pool's start."""
        return self.cell.offset


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for the objects of one store, and a pin on those that were cached before. Ends in commit or abort."""

    new: dict[bytes, Entry]
    cached: list[Entry]
    is_open: bool = True


@dataclass(slots=True)
class StoreStats:
    """Counters since the start."""

    stored: int = 0  # objects that became visible
    duplicates: int = 0  # objects whose key another store made visible first
    evicted: int = 0
    refused: int = 0  # reservations for which there was no room
    aborted: int = 0  # objects given back unfinished


@dataclass(slots=True)
class ChunkStore:
    """Objects by key in a pool of ``capacity`` bytes.

    >>> store = ChunkStore(1 << 20)
    >>> reservation = store.reserve([(b"key", 1000)])
    >>> store.get(b"key")  # unfinished: not there yet
    >>> store.commit(reservation)
    >>> store.get(b"key").offset
    0
    """

    capacity: int
    stats: StoreStats = field(default_factory=StoreStats)
    allocator: SlabAllocator = field(init=False)
    _index: dict[bytes, Entry] = field(init=False, default_factory=dict)
    _by_cell: dict[Cell, Entry] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity is {self.capacity} bytes; a store needs at least 1")
        self.allocator = SlabAllocator(self.capacity)

    def __len__(self) -> int:
        """Number of visible objects."""
        return len(self._index)

    @property
    def num_unfinished(self) -> int:
        """Objects with room but not visible: being written, or cleared while somebody reads them."""
        return len(self._by_cell) - len(self._index)

    @property
    def num_pinned(self) -> int:
        """Objects, visible or not, that are pinned."""
        return sum(1 for entry in self._by_cell.values() if entry.ref_count)

    def get(self, key: bytes) -> Entry | None:
        """The visible object of a key."""
        return self._index.get(key)

    def reserve(self, objects: Sequence[tuple[bytes, int]]) -> Reservation | None:
        """Room for every ``(key, nbytes)`` that is not cached yet, and a pin on the others; None: no room for all.

        Two stores of one key may run at once: each has its own room, and the first that commits wins.

        Raises:
            ValueError: A key is cached with another size, or there twice.
        """
        sizes = dict(objects)
        if len(sizes) != len(objects):
            raise ValueError("a store names one object twice")
        cached: list[Entry] = []
        missing: list[tuple[bytes, int]] = []
        for key, nbytes in objects:
            entry = self._index.get(key)
            if entry is None:
                missing.append((key, nbytes))
            elif entry.nbytes != nbytes:
                raise ValueError(f"object {key.hex()} is cached with {entry.nbytes} bytes, now it has {nbytes}")
            else:
                cached.append(entry)
        # The chunks before these are what makes them reachable: they must not be evicted to make the room.
        self.pin(cached)
        reservation = Reservation({}, cached)
        if self.allocator.fits([nbytes for _, nbytes in missing]):
            for key, nbytes in missing:
                cell = self._take(nbytes)
                if cell is None:
                    break
                entry = Entry(key, nbytes, cell, ref_count=1)
                self._by_cell[cell] = entry
                reservation.new[key] = entry
        if len(reservation.new) < len(missing):
            self.abort(reservation)
            self.stats.refused += 1
            return None
        return reservation

    def commit(self, reservation: Reservation) -> None:
        """Make the written objects visible, all at once."""
        assert reservation.is_open
        reservation.is_open = False
        for entry in reservation.new.values():
            if entry.key in self._index:
                self.stats.duplicates += 1
            else:
                self._index[entry.key] = entry
                entry.is_visible = True
                self.stats.stored += 1
        self.unpin(list(reservation.new.values()))
        self.unpin(reservation.cached)

    def abort(self, reservation: Reservation) -> None:
        """Give the room of unfinished objects back."""
        assert reservation.is_open
        reservation.is_open = False
        self.stats.aborted += len(reservation.new)
        self.unpin(list(reservation.new.values()))
        self.unpin(reservation.cached)

    def pin(self, entries: Iterable[Entry], times: int = 1) -> None:
        """Keep objects from eviction and their bytes from being overwritten."""
        for entry in entries:
            if not entry.ref_count:
                self.allocator.hold(entry.cell)
            entry.ref_count += times

    def unpin(self, entries: Sequence[Entry]) -> None:
        """Release one pin per object. At none, what is visible can be evicted and what is not is freed at once."""
        # Backwards, so that the head of a prefix is used last and evicted last.
        for entry in reversed(entries):
            assert entry.ref_count > 0
            entry.ref_count -= 1
            if not entry.ref_count:
                if entry.is_visible:
                    self.allocator.rest(entry.cell)
                else:
                    self._drop(entry)

    def clear(self) -> int:
        """Forget every visible object that is not pinned; returns how many."""
        idle = [entry for entry in self._index.values() if not entry.ref_count]
        for entry in idle:
            self._forget(entry)
            self._drop(entry)
        return len(idle)

    def hide(self) -> int:
        """Forget every visible object; what is pinned is freed with its last pin."""
        count = self.clear()
        for entry in list(self._index.values()):
            self._forget(entry)
            count += 1
        return count

    def _take(self, nbytes: int) -> Cell | None:
        while True:
            cell = self.allocator.take(nbytes)
            if cell is not None:
                return cell
            victims = self.allocator.make_room(nbytes)
            if victims is None:
                return None
            for victim in victims:
                entry = self._by_cell[victim]
                self._forget(entry)
                self._drop(entry)
            self.stats.evicted += len(victims)

    def _forget(self, entry: Entry) -> None:
        del self._index[entry.key]
        entry.is_visible = False

    def _drop(self, entry: Entry) -> None:
        del self._by_cell[entry.cell]
        self.allocator.give(entry.cell)
