"""Slots of the pool that are lent to engines that copy by themselves, to write into or to read from.

A slot is another's only when its holder said that it is done with it (a commit, giving it back, unregistering), or when
the holder's process is dead. Time alone proves nothing: an engine may be stopped in the middle of a copy for hours, and
go on. The lock on its liveness segment shows whether it lives: the kernel drops the lock with the process, however that
ends. Engines of LMCache have none, so for them the clock decides.

Loans outlive the registration of their holder. Not thread-safe: all of this belongs to the server's loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvshm.shm.liveness import LivenessProbe
from kvshm.store.chunk_store import ChunkStore, Entry, Reservation

__all__ = ["Holder", "Loan", "Loans"]


_MAX_GIVEN_BACK = 1000


@dataclass(slots=True, eq=False)
class Holder:
    """An engine that copies by itself."""

    instance_id: int
    liveness: LivenessProbe | None  # None: the clock decides

    @property
    def is_dead(self) -> bool:
        """Whether its process is known to be dead."""
        return self.liveness is not None and self.liveness.is_free()


@dataclass(slots=True, eq=False)
class Loan:
    """Slots that were lent for one store or one retrieve."""

    holder: Holder
    reservation: Reservation | None  # of a store: not visible until it is committed
    entries: list[Entry]  # of a retrieve: kept from eviction
    deadline: float
    reply: Any = None  # what the engine is answered, also if it asks again
    hashes: list[bytes] = field(default_factory=list)  # of the prompt's chunks

    @property
    def num_unfinished(self) -> int:
        """Slots that nobody finds until they are committed."""
        return len(self.reservation.new) if self.reservation else 0


class Loans:
    """All loans, by holder and a name that both sides have for them.

    Args:
        ttl_s: How long a loan lasts whose holder has no liveness segment.
    """

    def __init__(self, store: ChunkStore, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._stores: dict[tuple[int, Hashable], Loan] = {}
        self._reads: dict[tuple[int, Hashable], list[Loan]] = {}
        # A request may arrive after the message that returns its slots: then there is nobody to lend them to.
        self._given_back: OrderedDict[tuple[int, Hashable], None] = OrderedDict()

    def __iter__(self) -> Iterator[Loan]:
        yield from self._stores.values()
        for loans in self._reads.values():
            yield from loans

    def counts(self, instance_id: int) -> tuple[int, int]:
        """How many stores and retrieves an engine has slots for."""
        stores = sum(1 for owner, _ in self._stores if owner == instance_id)
        return stores, sum(len(loans) for (owner, _), loans in self._reads.items() if owner == instance_id)

    def lend_to_write(
        self,
        holder: Holder,
        name: Hashable,
        reservation: Reservation,
        now: float,
        reply: Any,
        hashes: list[bytes] | None = None,
    ) -> Loan:
        """Lend reserved slots."""
        loan = Loan(holder, reservation, [], now + self._ttl_s, reply, hashes or [])
        self._stores[holder.instance_id, name] = loan
        return loan

    def lend_to_read(self, holder: Holder, name: Hashable, entries: list[Entry], now: float) -> Loan:
        """Lend cached objects, which are kept until they are given back."""
        self._store.pin(entries)
        loan = Loan(holder, None, entries, now + self._ttl_s)
        self._reads.setdefault((holder.instance_id, name), []).append(loan)
        return loan

    def to_write(self, instance_id: int, name: Hashable) -> Loan | None:
        """The slots that an engine was lent for a store."""
        return self._stores.get((instance_id, name))

    def renew(self, loan: Loan, now: float) -> None:
        """Let a loan last as long as a new one."""
        loan.deadline = now + self._ttl_s

    def end_write(self, instance_id: int, name: Hashable) -> Loan | None:
        """Take a store's loan out; its reservation is the caller's to commit or abort."""
        return self._stores.pop((instance_id, name), None)

    def end_read(self, instance_id: int, name: Hashable) -> Loan | None:
        """Give the latest loan of a retrieve back."""
        loans = self._reads.get((instance_id, name))
        if not loans:
            return None
        loan = loans.pop()
        if not loans:
            del self._reads[instance_id, name]
        self._store.unpin(loan.entries)
        return loan

    def give_back(self, instance_id: int, name: Hashable) -> int:
        """The engine does not use what it was lent; returns how many slots were unfinished."""
        taken = 0
        loan = self.end_write(instance_id, name)
        if loan is not None and loan.reservation is not None:
            taken = loan.num_unfinished
            self._store.abort(loan.reservation)
        while self.end_read(instance_id, name) is not None:
            pass
        return taken

    def refuse(self, instance_id: int, name: Hashable) -> None:
        """Lend nothing under this name any more."""
        self._given_back[instance_id, name] = None
        if len(self._given_back) > _MAX_GIVEN_BACK:
            self._given_back.popitem(last=False)

    def is_refused(self, instance_id: int, name: Hashable) -> bool:
        """Whether what is lent under this name was given back already, or is lent."""
        key = (instance_id, name)
        return key in self._given_back or key in self._stores or key in self._reads

    def end_of(self, instance_id: int) -> int:
        """The engine is done with all that it was lent; returns how many slots were unfinished."""
        names = [name for owner, name in [*self._stores, *self._reads] if owner == instance_id]
        return sum(self.give_back(instance_id, name) for name in names)

    def expire(self, now: float) -> int:
        """Take back what dead engines had, and what the clock takes from those that have no liveness segment.

        Returns how many slots were unfinished.
        """
        dead = {holder for holder in {loan.holder for loan in self} if holder.is_dead}

        def is_over(loan: Loan) -> bool:
            return loan.holder in dead or (loan.holder.liveness is None and loan.deadline <= now)

        taken = 0
        for key, loan in list(self._stores.items()):
            if is_over(loan):
                del self._stores[key]
                assert loan.reservation is not None
                taken += loan.num_unfinished
                self._store.abort(loan.reservation)
        for key, loans in list(self._reads.items()):
            for loan in [loan for loan in loans if is_over(loan)]:
                loans.remove(loan)
                self._store.unpin(loan.entries)
            if not loans:
                del self._reads[key]
        return taken

    def end_all(self) -> int:
        """Take everything back: the pool goes. Returns how many slots were unfinished."""
        return sum(self.end_of(instance_id) for instance_id in {loan.holder.instance_id for loan in self})
