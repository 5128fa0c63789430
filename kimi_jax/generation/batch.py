"""The rows of the requests that decode together, as arrays on the devices."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from ..runtime.rows import Rows
from .requests import Request, RequestOptions

Place = Callable[[np.ndarray], jax.Array]  # puts an array whose first dim is rows on the mesh
MIN_STEPS = 8  # least steps that a decode loop is compiled for
MIN_STOP_IDS = 8  # least width of the array of stop ids


def power_of_two(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()


class Batch:
    """Makes `Rows` of `size` rows for one run.

    What the compiled loop depends on is the same for all batches of the run: sizes are powers of
    two that hold what any of its requests asks for. What each row asks for is in arrays, which stay
    on the devices until other requests decode.
    """

    def __init__(
        self,
        options: Iterable[RequestOptions],
        size: int,
        vocab: int,
        steps_per_call: int,
        place: Place,
    ):
        options = list(options)
        top = max(o.top_logprobs for o in options)
        self._size, self._vocab, self._place = size, vocab, place
        self._stop_ids = power_of_two(max(MIN_STOP_IDS, *(len(o.stop_ids) for o in options)))
        self._has_bias = any(o.logit_bias for o in options)
        self._has_repetition_penalty = any(o.sampling.repetition_penalty != 1 for o in options)
        self._has_reply_penalty = any(_has_reply_penalty(o) for o in options)
        self._static = {
            "top_logprobs": min(power_of_two(top), vocab) if top else 0,
            "draws": any(o.sampling.temperature > 0 for o in options),
            "masks_stops": any(o.min_new_tokens > 0 for o in options),
            "steps_per_call": max(power_of_two(steps_per_call), MIN_STEPS),
        }
        self._placed_for: dict[int, Request] | None = None
        self._settings: dict[str, Any] = {}

    def rows(self, decoding: Mapping[int, Request]) -> Rows:
        """The rows of the requests by slot; rows of other slots are inactive."""
        if self._placed_for != decoding:
            self._placed_for = dict(decoding)
            self._settings = self._place_settings(decoding)
        return Rows(
            active=self._column(decoding, bool, False, lambda request: True),
            remaining=self._column(decoding, np.int32, 0, lambda request: request.remaining),
            counts=self._column(decoding, np.int32, 0, lambda request: len(request.tokens)),
            seen=self._place(self._seen(decoding)) if self._has_repetition_penalty else None,
            reply_counts=(
                self._place(self._reply_counts(decoding)) if self._has_reply_penalty else None
            ),
            **self._settings,
            **self._static,
        )

    def _column(
        self,
        decoding: Mapping[int, Request],
        dtype: Any,
        default: Any,
        value: Callable[[Request], Any],
    ) -> jax.Array:
        """A number of every row: `value` of its request, or `default` where the slot is empty."""
        column = np.full(self._size, default, dtype)
        for slot, request in decoding.items():
            column[slot] = value(request)
        return self._place(column)

    def _place_settings(self, decoding: Mapping[int, Request]) -> dict[str, Any]:
        """The fields of `Rows` that no step changes."""

        def sampling(name: str, dtype: Any, default: Any) -> jax.Array:
            return self._column(
                decoding, dtype, default, lambda request: getattr(request.options.sampling, name)
            )

        return {
            "seeds": self._column(decoding, np.int32, 0, lambda request: request.options.seed),
            "temperature": sampling("temperature", np.float32, 0),
            "top_k": sampling("top_k", np.int32, 0),
            "top_p": sampling("top_p", np.float32, 1),
            "min_p": sampling("min_p", np.float32, 0),
            "repetition_penalty": sampling("repetition_penalty", np.float32, 1),
            "frequency_penalty": sampling("frequency_penalty", np.float32, 0),
            "presence_penalty": sampling("presence_penalty", np.float32, 0),
            "min_new_tokens": self._column(
                decoding, np.int32, 0, lambda request: request.options.min_new_tokens
            ),
            "stop_ids": self._place(self._stops(decoding)),
            "bias": self._place(self._bias(decoding)) if self._has_bias else None,
        }

    def _stops(self, decoding: Mapping[int, Request]) -> np.ndarray:
        """[B, M] stop ids, padded with -1, which is not an id."""
        stops = np.full((self._size, self._stop_ids), -1, np.int32)
        for slot, request in decoding.items():
            ids = sorted(request.options.stop_ids)
            stops[slot, : len(ids)] = ids
        return stops

    def _bias(self, decoding: Mapping[int, Request]) -> np.ndarray:
        """[B, Z] numbers to add to logits."""
        bias = np.zeros((self._size, self._vocab), np.float32)
        for slot, request in decoding.items():
            for token, value in request.options.logit_bias:
                bias[slot, token] = value
        return bias

    def _seen(self, decoding: Mapping[int, Request]) -> np.ndarray:
        """[B, Z] whether prompt or reply hold an id, where a penalty asks for it."""
        seen = np.zeros((self._size, self._vocab), bool)
        for slot, request in decoding.items():
            if request.options.sampling.repetition_penalty != 1:
                seen[slot, request.ids + request.tokens] = True
        return seen

    def _reply_counts(self, decoding: Mapping[int, Request]) -> np.ndarray:
        """[B, Z] how often the reply holds an id, where a penalty asks for it."""
        counts = np.zeros((self._size, self._vocab), np.int32)
        for slot, request in decoding.items():
            if _has_reply_penalty(request.options):
                np.add.at(counts[slot], request.tokens, 1)
        return counts


def _has_reply_penalty(options: RequestOptions) -> bool:
    """Whether a request's logits depend on how often its reply holds a token."""
    return bool(options.sampling.frequency_penalty or options.sampling.presence_penalty)
