"""Many requests through few slots, on one device and over meshes: what every path writes is what
forwards that keep nothing say; what fails, stops or is cut off touches no other request.
"""

import dataclasses
import functools
import itertools
import json
import signal
import sys

import jax
import numpy as np
import pytest
from models import MESHED, SHALLOW_MESHED, compilations, write
from pairs import results_of, start_pair
from tolerances import PATHS

import kimi_jax as kj
from kimi_jax.api import Model
from kimi_jax.generation import engine
from kimi_jax.generation import generate as g
from kimi_jax.generation.requests import PromptIds, Request, RequestOptions

# Selected keys between layers of KDA; every size over 8 ranks.
CONFIG = dataclasses.replace(MESHED, mla_layers=(1,), max_positions=2048)
BOTH, P = ("data", "model"), kj.Placement
PLACES = {
    "one device": (1, 1, P()),
    "1x8, helix, sliced rows": (1, 8, P(keys="helix", rows="sliced")),
    "2x4, experts over all": (2, 4, P(expert_axes=BOTH, exchange="values", keys="helix")),
}
CHUNK, SLOTS, NEW, WIDTH = 64, 4, 4, 1024
ORDER = (1000, 1, 64, 2, 200, 65, 3, 63)
OPTIONS = dict(max_new_tokens=NEW, stop_tokens=[], slots=SLOTS, logprobs=True)
WARM = 0.8


def prompts_of(lengths, seed=0):
    """Random ids from 8 on."""
    rng = np.random.default_rng(seed)
    return [rng.integers(8, CONFIG.vocab, n).tolist() for n in lengths]


# Sixteen prompts through four slots.
PROMPTS = prompts_of((*ORDER, *ORDER[::-1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(CONFIG, tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture(scope="module")
def fresh(folder):
    """(prompt, tokens) -> the logits of one device's forward that keeps nothing, one row for each
    of the tokens: the model is causal.
    """
    model = kj.load(folder, dtype="float32", chunk=CHUNK)

    @functools.cache
    def forward(ids):
        row = np.zeros((1, WIDTH), np.int32)
        row[0, : len(ids)] = ids
        return np.asarray(model.logits(row, [len(ids)]))[0].astype(np.float64)

    return lambda prompt, tokens: forward((*prompt, *tokens))[len(prompt) - 1 :][: len(tokens)]


@dataclasses.dataclass(frozen=True)
class Placed:
    """A model, the replies to all prompts, and how many programs they took."""

    model: Model
    replies: list
    programs: int

    @property
    def tokens(self):
        return [reply.tokens for reply in self.replies]


@pytest.fixture(scope="module", params=PLACES)
def placed(request, folder):
    data, model, place = PLACES[request.param]
    model = kj.load(folder, kj.make_mesh(data, model), place, "float32", chunk=CHUNK)
    programs, replies = compilations(lambda: model.generate(PROMPTS, **OPTIONS))
    return Placed(model, replies, programs)


def only(*names):
    """The placements of a test whose programs are worth compiling on some alone."""
    return pytest.mark.parametrize("placed", names, indirect=True)


def are_the_best(scores, tokens):
    """Whether tokens are the best by float32 scores, which leave no doubt of it."""
    best = np.sort(scores)
    assert (best[:, -1] - best[:, -2]).min() > 2 * PATHS
    return scores.argmax(-1).tolist() == tokens


# What is written


def test_greedy_ids_are_the_argmax_of_forwards_that_keep_nothing(placed, fresh):
    assert [len(reply.tokens) for reply in placed.replies] == [NEW] * len(PROMPTS)
    for prompt, reply in zip(PROMPTS, placed.replies, strict=True):
        logits = fresh(prompt, reply.tokens)
        assert are_the_best(logits, reply.tokens), len(prompt)
        wanted = np.asarray(jax.nn.log_softmax(logits, -1))[np.arange(NEW), reply.tokens]
        said = [one.logprob for one in reply.logprobs]
        np.testing.assert_allclose(said, wanted, atol=PATHS, rtol=0)


def noise(seed, count):
    key = jax.random.fold_in(jax.random.key(seed), count)
    return np.asarray(jax.random.gumbel(key, CONFIG.vocab, np.float32))


def test_drawn_ids_are_those_of_forwards_and_of_seed_and_count(placed, fresh):
    """The best of logits / temperature and a noise that each place of a reply has of its own."""
    seeds = [7 * i for i in range(len(PROMPTS))]
    replies = placed.model.generate(PROMPTS, temperature=WARM, seed=seeds, **OPTIONS)
    for prompt, seed, reply in zip(PROMPTS, seeds, replies, strict=True):
        logits = fresh(prompt, reply.tokens) / WARM
        scores = logits + np.stack([noise(seed, count) for count in range(NEW)])
        assert are_the_best(scores, reply.tokens), len(prompt)


@only("one device", "2x4, experts over all")
def test_as_many_slots_as_data_ranks_take_prompts_in_where_they_decode(placed):
    """A row that decodes stands still while another one's prompt is prefilled."""
    replies = placed.model.generate(PROMPTS[:6], **OPTIONS | dict(slots=1))
    assert [reply.tokens for reply in replies] == placed.tokens[:6]


def test_stop_ids_end_some_requests_early_and_results_keep_their_order(placed):
    stop = placed.tokens[0][1]
    options = OPTIONS | dict(stop_tokens=[stop])
    replies = placed.model.generate(PROMPTS[7::-1], **options)[::-1]
    for reply, free in zip(replies, placed.tokens[:8], strict=True):
        wanted = list(itertools.takewhile(lambda token: token != stop, free))
        assert reply.tokens == wanted
        assert reply.finish_reason == ("length" if len(wanted) == NEW else "stop")
    assert {reply.finish_reason for reply in replies} == {"length", "stop"}


def poisoned(model, token):
    """The model with NaN for the embedding of one token."""
    embed = model.params[("embed",)]
    broken = np.array(embed)
    broken[token] = np.nan
    weights = model.params | {("embed",): jax.device_put(broken, embed.sharding)}
    return dataclasses.replace(model, params=weights)


def test_requests_that_fail_leave_all_others_as_they_are(placed):
    """One of NaN, in a prefill row and a slot that others take after it, also ones too short to
    write over its keys; one over the context.
    """
    bad = next(iter(set(range(1, 8)).difference(*placed.tokens)))
    broken = poisoned(placed.model, bad)
    prompts = [PROMPTS[0], [9, bad, *PROMPTS[4]], *PROMPTS[1:5], [9] * 2048, *PROMPTS[5:8]]
    replies = broken.generate(prompts, **OPTIONS)
    long, nan = replies.pop(6), replies.pop(1)
    assert (nan.finish_reason, nan.tokens) == ("error", []) and "NaN" in nan.error
    assert (long.finish_reason, long.tokens) == ("error", [])
    assert "prompt 6 has 2048 tokens" in long.error
    assert [reply.tokens for reply in replies] == placed.tokens[:8]
    assert {reply.finish_reason for reply in replies} == {"length"}


# When


def request_of(prompt, limit):
    return Request(PromptIds(prompt), RequestOptions(), limit)


def test_running_requests_advance_after_every_chunk_of_a_long_prompt(placed, fresh):
    """By one token while prompts are prefilled, by all steps of a call once no request waits."""
    requests = [request_of([9], 40), request_of(PROMPTS[0], NEW)]
    requests += [request_of([n], NEW) for n in (10, 11)]
    advanced, at_chunks = [], []
    for report in engine.run(placed.model, requests, engine.RunOptions(SLOTS)):
        advanced.append(report.advanced)
        if report.prompt_tokens >= len(PROMPTS[0]) % CHUNK:
            at_chunks.append(len(requests[0].tokens))
    chunks = -(-len(PROMPTS[0]) // CHUNK)
    assert at_chunks == list(range(at_chunks[0], at_chunks[0] + chunks))
    assert max(advanced) >= CHUNK and engine.STEPS_PER_CALL in advanced
    assert sum(advanced) == sum(len(one.ids) + len(one.tokens) for one in requests)
    for one in requests:
        assert len(one.tokens) == one.limit
        assert are_the_best(fresh(one.ids, one.tokens), one.tokens)


def test_a_batch_compiles_each_program_once_and_a_second_one_nothing(placed):
    """Empty rows and slots, prompts of 1, 16 and 64 tokens, a move to a slot, decode steps."""
    assert placed.programs == 2 + 3 + 1 + 1
    again, _ = compilations(lambda: placed.model.generate(PROMPTS[8:], **OPTIONS))
    assert again == 0


def test_many_lengths_compile_no_more_than_few(tmp_path):
    """64 prompts of 1 to 500 tokens; then 64 others."""
    model = kj.load(write(SHALLOW_MESHED, tmp_path / "model"), dtype="float32", chunk=CHUNK)
    rng, options, counts = np.random.default_rng(1), dict(max_new_tokens=2, stop_tokens=[]), []
    for first, last in ((1, 500), (2, 499)):
        prompts = prompts_of(rng.permutation(np.geomspace(first, last, 64).astype(int)), first)
        counts.append(compilations(lambda ids=prompts: model.generate(ids, **options))[0])
    assert counts == [7, 0]


# Cut off


def interrupted(monkeypatch, owner, name, nth):
    """Ctrl-C behind the nth call of a function."""
    inner, calls = getattr(owner, name), itertools.count(1)

    def outer(*args, **kwargs):
        done = inner(*args, **kwargs)
        if next(calls) == nth:
            signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(owner, name, outer)


@pytest.fixture
def ctrl_c():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


MOMENTS = {
    "a chunk": (Model, "advance", 5),
    "a trip": (engine, "to_host", 7),
    "a request that begins": (g, "_say", 3),
    "a count of tokens": (g.Progress, "advance", 9),
}


@only("one device", "1x8, helix, sliced rows")
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_leaves_the_model_as_it_was(placed, ctrl_c, monkeypatch, moment):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        interrupted(patched, *MOMENTS[moment])
        placed.model.generate(PROMPTS, verbose=True, **OPTIONS)
    again = placed.model.generate(PROMPTS[:4], **OPTIONS)
    assert [reply.tokens for reply in again] == placed.tokens[:4]


@only("one device", "1x8, helix, sliced rows")
def test_a_stream_closed_or_dropped_midway_leaves_nothing_and_the_model_as_it_was(placed):
    stream = lambda: placed.model.stream(PROMPTS[0], max_new_tokens=9, stop_tokens=[])  # noqa: E731
    before = len(jax.live_arrays())
    closed, dropped, idle = stream(), stream(), stream()
    assert [next(closed).token, next(dropped).token] == [placed.tokens[0][0]] * 2
    closed.close()
    assert list(closed) == []
    del dropped, idle
    assert len(jax.live_arrays()) == before
    assert [event.token for event in stream()][:NEW] == placed.tokens[0]
    again = placed.model.generate(PROMPTS[:4], **OPTIONS)
    assert [reply.tokens for reply in again] == placed.tokens[:4]


# Two processes

SCRIPT = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
folder, address, me, prompts = sys.argv[1:]
jax.distributed.initialize(address, 2, int(me))
import kimi_jax as kj

prompts = json.loads(prompts)
model = kj.load(folder, kj.make_mesh(2, 4), dtype="float32", chunk=8)
options = dict(max_new_tokens=5, stop_tokens=[], slots=2)
first = model.generate(prompts, **options)
stream = model.stream(prompts[1], max_new_tokens=20, stop_tokens=[])
begun = [next(stream).token for _ in range(5)]
stream.close()
second = model.generate(prompts[::-1], **options)
cache, session = kj.PrefixCache(model, 2**24), model.session()
model.generate(prompts, prefix_cache=cache, **options)
warm = model.generate(prompts, prefix_cache=cache, **options)
session.generate(prompts[1][:9], max_new_tokens=1)
session.tokens = prompts[1][:9]
turn = session.generate(prompts[1][9:], max_new_tokens=5, stop_tokens=[])
replies = [[reply.tokens for reply in all] for all in (first, second[::-1], warm)]
known = [reply.usage.cached_tokens for reply in [*warm, turn]]
print(json.dumps([*replies, begun, turn.tokens, known]))
"""


def test_two_processes_write_what_one_does(tmp_path):
    """Five prompts through the one slot that each data rank has; also after a stream that was
    closed, behind prefixes that are known, and in a session.
    """
    folder, prompts = write(SHALLOW_MESHED, tmp_path / "model"), prompts_of((5, 16, 3, 9, 1))
    asked = json.dumps(prompts)
    said = results_of(
        start_pair(lambda at, me: [sys.executable, "-c", SCRIPT, folder, at, str(me), asked])
    )
    one = kj.load(folder, dtype="float32")
    wanted = [reply.tokens for reply in one.generate(prompts, max_new_tokens=5, stop_tokens=[])]
    for _, out, errors in said:
        assert out, errors
        known = [0, 16, 0, 8, 0, 9]
        assert json.loads(out.splitlines()[-1]) == [wanted] * 3 + [wanted[1]] * 2 + [known]
