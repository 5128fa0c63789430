"""Which request holds which slot. Knows nothing of what a request is."""

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass
class Schedule:
    """Requests that wait, are prefilled in a prefill row with a decode slot reserved, or decode in
    that slot. Requests are numbers, first come first served.
    """

    waiting: collections.deque[int]
    free_slots: list[int]
    free_prefill_rows: list[int] | None  # None: a prompt is prefilled where it will decode
    # prefill row: (request, slot)
    prefilling: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    decoding: dict[int, int] = dataclasses.field(default_factory=dict)  # slot: request

    @classmethod
    def of(cls, requests: Sequence[int], slots: int, prefill_rows: int) -> "Schedule":
        """All requests waiting before empty slots; as many prefill rows as slots are the slots."""
        free = None if prefill_rows == slots else list(range(prefill_rows))
        return cls(collections.deque(requests), list(range(slots)), free)

    @property
    def is_busy(self) -> bool:
        """Whether some request has not ended yet."""
        return bool(self.waiting or self.prefilling or self.decoding)

    @property
    def is_filling(self) -> bool:
        """Whether a prompt is being prefilled, or another could be."""
        return bool(self.prefilling or (self.waiting and self.free_slots))

    def admit(self) -> list[tuple[int, int]]:
        """Admit requests while rows and slots are free: (prefill row, request) of each."""
        admitted = []
        while self.waiting and self.free_slots and self.free_prefill_rows != []:
            request, slot = self.waiting.popleft(), self.free_slots.pop(0)
            row = slot if self.free_prefill_rows is None else self.free_prefill_rows.pop(0)
            self.prefilling[row] = (request, slot)
            admitted.append((row, request))
        return admitted

    def begin(self, row: int) -> int:
        """A prompt is prefilled: its request decodes from now on, in the slot that is returned."""
        request, slot = self.prefilling.pop(row)
        if self.free_prefill_rows is not None:
            self.free_prefill_rows.append(row)
        self.decoding[slot] = request
        return slot

    def end(self, slot: int) -> int:
        """A request has ended: its slot is free again."""
        self.free_slots.append(slot)
        return self.decoding.pop(slot)
