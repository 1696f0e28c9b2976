"""The chunk store against a slow model: no two objects share a byte, nothing held goes, all room comes back."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvshm.store.chunk_store import ChunkStore, Entry, Reservation

CAPACITY = 20_011
SIZES = (1, 64, 100, 997, 2_003, 7_919)
keys = st.integers(0, 11)


class StoreMachine(RuleBasedStateMachine):
    reservations = Bundle("reservations")
    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.store = ChunkStore(CAPACITY)
        self.open: list[Reservation] = []
        self.held: list[list[Entry]] = []
        self.hidden: set[Entry] = set()

    @rule(target=reservations, chosen=st.sets(keys, max_size=5), size=st.sampled_from(SIZES))
    def reserve(self, chosen: set[int], size: int) -> Reservation | None:
        objects = [(b"%d-%d" % (key, size), size) for key in sorted(chosen)]
        reservation = self.store.reserve(objects)
        if reservation is None:
            return None
        assert {entry.key for entry in reservation.cached} | set(reservation.new) == {key for key, _ in objects}
        self.open.append(reservation)
        return reservation

    @rule(reservation=consumes(reservations), commit=st.booleans())
    def finish(self, reservation: Reservation | None, commit: bool) -> None:
        if reservation is None:
            return
        self.open.remove(reservation)
        if commit:
            self.store.commit(reservation)
            for key in reservation.new:
                assert self.store.get(key) is not None, "answered and yet a miss"
            for entry in reservation.cached:
                assert self.store.get(entry.key) is entry or entry in self.hidden
        else:
            self.store.abort(reservation)

    @rule(target=holds, chosen=st.sets(keys, max_size=5), size=st.sampled_from(SIZES))
    def hold(self, chosen: set[int], size: int) -> list[Entry]:
        found = [entry for key in chosen if (entry := self.store.get(b"%d-%d" % (key, size)))]
        self.store.pin(found)
        self.held.append(found)
        return found

    @rule(found=consumes(holds))
    def release(self, found: list[Entry]) -> None:
        self.held.remove(found)
        self.store.unpin(found)

    @rule(force=st.booleans())
    def clear(self, force: bool) -> None:
        if force:
            self.hidden |= {entry for entry in self.store._by_cell.values() if entry.is_visible}
            self.store.hide()
            assert len(self.store) == 0
        else:
            self.store.clear()

    @invariant()
    def held_objects_stay(self) -> None:
        for entry in [entry for found in self.held for entry in found]:
            assert self.store._by_cell[entry.cell] is entry
            assert self.store.get(entry.key) is entry or entry in self.hidden

    @invariant()
    def no_two_objects_share_a_byte(self) -> None:
        spans = sorted((entry.offset, entry.offset + entry.nbytes) for entry in self.store._by_cell.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert not spans or spans[-1][1] <= self.store.allocator.nbytes

    @invariant()
    def counts_agree(self) -> None:
        expected: dict[Entry, int] = {}
        for reservation in self.open:
            for entry in (*reservation.new.values(), *reservation.cached):
                expected[entry] = expected.get(entry, 0) + 1
        for entry in [entry for found in self.held for entry in found]:
            expected[entry] = expected.get(entry, 0) + 1
        for entry in self.store._by_cell.values():
            assert entry.ref_count == expected.get(entry, 0)
        allocator = self.store.allocator
        assert allocator.busy_nbytes == sum(entry.cell.nbytes for entry in expected)
        assert allocator.used_nbytes == sum(entry.cell.nbytes for entry in self.store._by_cell.values())

    def teardown(self) -> None:
        for reservation in self.open:
            self.store.abort(reservation)
        for found in self.held:
            self.store.unpin(found)
        self.store.hide()
        allocator = self.store.allocator
        assert (allocator.used_nbytes, allocator.busy_nbytes, allocator._classes) == (0, 0, {})
        assert not any(allocator._map)
        assert self.store.num_unfinished == 0


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
