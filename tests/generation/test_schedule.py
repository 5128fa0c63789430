"""Which request holds which slot."""

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.generation.schedule import Schedule


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=30),
    st.integers(1, 5),
    st.integers(1, 3),
)
@settings(max_examples=60)
def test_a_schedule_loses_no_request_starves_none_and_shares_no_slot(work, slots, prefill_rows):
    """Each request takes some chunks and some decode calls."""
    schedule = Schedule.of(range(len(work)), slots, prefill_rows)
    chunks, calls, order, ended, rounds = {}, {}, [], [], 0
    while schedule.is_busy:
        rounds += 1
        for row, who in schedule.admit():
            chunks[row] = work[who][0]
            order.append(who)
        kept = [slot for _, slot in schedule.prefilling.values()]
        in_place = slots == prefill_rows
        free = schedule.free_slots if in_place else schedule.free_prefill_rows
        assert not (schedule.waiting and free and schedule.free_slots)  # beside an empty place
        if in_place:
            assert list(schedule.prefilling) == kept
        else:
            assert sorted([*schedule.prefilling, *free]) == list(range(prefill_rows))
        taken = kept + list(schedule.decoding) + schedule.free_slots
        assert sorted(taken) == list(range(slots))
        for row in list(schedule.prefilling):
            chunks[row] -= 1
            if not chunks[row]:
                who = schedule.prefilling[row][0]
                calls[schedule.begin(row)] = [who, work[who][1]]
        later = copy.deepcopy(schedule)  # as it will be if no request ends
        later.admit()
        assert schedule.is_filling == bool(later.prefilling)
        for slot in list(schedule.decoding):
            calls[slot][1] -= 1
            if not calls[slot][1]:
                assert schedule.end(slot) == calls[slot][0]
                ended.append(calls[slot][0])
        assert rounds <= sum(sum(one) for one in work)
    assert order == list(range(len(work)))
    assert sorted(ended) == order
