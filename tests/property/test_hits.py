"""The longest hit, against a search that tries every length and looks at every chunk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvshm.layout import ObjectLayout
from kvshm.server.hits import Hit, Need, longest_hit

NUM_CHUNKS = 7

needs_and_rows = st.lists(
    st.tuples(
        st.integers(0, 2),  # worker
        st.sampled_from([-1, -1, 1, 2, 3, NUM_CHUNKS + 1]),  # window
        st.lists(st.booleans(), min_size=NUM_CHUNKS, max_size=NUM_CHUNKS),  # what is cached
    ),
    max_size=5,
)


@given(needs_and_rows, st.integers(0, NUM_CHUNKS), st.randoms(use_true_random=False))
def test_a_hit_is_the_longest_prefix_that_every_need_is_served_from(
    drawn: list[tuple[int, int, list[bool]]], num_chunks: int, random: object
) -> None:
    table = {
        Need(worker_id, ObjectLayout(bytes([index]), 1, window)): row
        for index, (worker_id, window, row) in enumerate(drawn)
    }

    def cached(need: Need, count: int) -> list[tuple[Need, int] | None]:
        return [(need, chunk) if table[need][chunk] else None for chunk in range(count)]

    def is_served(need: Need, length: int) -> bool:
        window = need.layout.num_chunks_in_sw
        first = 0 if window < 0 else max(0, length - window)
        return all(table[need][chunk] for chunk in range(first, length))

    served = [length for length in range(num_chunks + 1) if all(is_served(need, length) for need in table)]
    expected = max(served) if table else 0
    needs = list(table)
    random.shuffle(needs)  # type: ignore[attr-defined]
    hit: Hit[tuple[Need, int]] = longest_hit(needs, num_chunks, cached)
    assert hit.num_chunks == expected
    found = {(part.worker_id, *entry) for part in hit.found for entry in part.entries}
    wanted = {
        (need.worker_id, need, chunk) for need in table for chunk in need.layout.needed_chunks(expected) if expected
    }
    assert found == wanted
    for part in hit.found:
        assert [chunk for _, chunk in part.entries] == list(range(part.first_chunk, expected))
