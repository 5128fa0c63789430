"""Generation with drafts: the tokens of generation without, whatever is drafted."""

import functools

import numpy as np
import pytest
from drafters import Told
from models import SHALLOW, SHALLOW_MESHED, write
from tolerances import EXACT

import kimi_jax as kj
from kimi_jax.model.step import Tapped
from kimi_jax.speculation.ngram import following

PROMPTS = [np.random.default_rng(n).integers(0, SHALLOW.vocab, n).tolist() for n in (3, 21, 1, 8)]
GREEDY = dict(max_new_tokens=[9, 5, 12, 1], stop_tokens=[])
DRAWN = dict(
    max_new_tokens=9, temperature=[0.9, 0.0, 1.5, 1.0], top_p=0.9, top_k=30, seed=[3, 4, 5, 6],
    repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=[0.1, 0.0, 0.0, 0.3],
    min_new_tokens=3, stop_tokens=list(range(0, 80, 9)), logprobs=2,
)  # fmt: skip
TAPPED = Tapped((0,), "mixture")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write(SHALLOW, tmp_path_factory.mktemp("models") / "shallow")
    return kj.load(folder, dtype="float64", chunk=16)


@pytest.fixture(scope="module")
def plain(model):
    """Completions without a draft, and the texts that they make, by option."""

    @functools.cache
    def get(name):
        replies = model.generate(PROMPTS, slots=2, **{"greedy": GREEDY, "drawn": DRAWN}[name])
        return replies, [p + reply.tokens for p, reply in zip(PROMPTS, replies, strict=True)]

    return get


def drafter(texts, right=99, **options):
    return Told(texts, SHALLOW.vocab, right, **options)


@pytest.mark.parametrize("right, tapped", [(99, TAPPED), (2, None), (1, TAPPED), (0, None)])
def test_greedy_tokens_are_those_without_a_draft(model, plain, right, tapped):
    """Four prompts through two slots, with drafts that are right, right until a token, or wrong."""
    wanted, texts = plain("greedy")
    draft = drafter(texts, right, tapped=tapped)
    found = model.generate(PROMPTS, slots=2, draft=draft, **GREEDY)
    for reply, other in zip(found, wanted, strict=True):
        assert (reply.tokens, reply.finish_reason) == (other.tokens, other.finish_reason)
        if not (acceptance := reply.acceptance):
            assert len(reply.tokens) == 1
            continue
        # The first token is the prompt's, each round gives one more than it accepts.
        assert 1 + sum(acceptance.accepted) + acceptance.rounds == len(reply.tokens)
        assert all(
            n == min(right, k) for k, n in zip(acceptance.drafts, acceptance.accepted, strict=True)
        )
        assert sum(acceptance.histogram) == acceptance.rounds
        assert acceptance.length == 1 + sum(acceptance.accepted) / acceptance.rounds


@pytest.mark.parametrize("right", [99, 1])
def test_drawn_tokens_are_those_without_a_draft(model, plain, right):
    """Every option of sampling, stop ids among drafts that are accepted, log-probabilities."""
    wanted, texts = plain("drawn")
    assert {reply.finish_reason for reply in wanted} == {"stop", "length"}
    found = model.generate(PROMPTS, slots=2, draft=drafter(texts, right), drafts=2, **DRAWN)
    for reply, other in zip(found, wanted, strict=True):
        assert (reply.tokens, reply.finish_reason) == (other.tokens, other.finish_reason)
        for one, two in zip(reply.logprobs, other.logprobs, strict=True):
            assert (
                abs(one.logprob - two.logprob) < EXACT
                and dict(one.top).keys() == dict(two.top).keys()
            )


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rules_of_rejection_give_greedy_tokens_and_draw_the_others(model, plain, rule):
    """A draft that is right is accepted with its probability: greedy rows accept all."""
    wanted, texts = plain("greedy")
    options = dict(GREEDY, slots=2, draft=drafter(texts), draft_rule=rule)
    greedy = model.generate(PROMPTS, **options)
    assert [reply.tokens for reply in greedy] == [reply.tokens for reply in wanted]
    assert greedy[0].acceptance.accepted == greedy[0].acceptance.drafts
    options |= dict(temperature=1.0, seed=2, logprobs=1)
    drawn, again = (model.generate(PROMPTS, **options) for _ in range(2))
    assert [x.tokens for x in drawn] == [x.tokens for x in again] != [x.tokens for x in wanted]
    for prompt, reply in zip(PROMPTS, drawn, strict=True):
        scores = model.score([prompt + reply.tokens])[0].logprobs[-len(reply.tokens) :]
        found = [entry.logprob for entry in reply.logprobs]
        np.testing.assert_allclose(found, scores, atol=1e-6)


def test_turns_of_a_session_and_their_drafter_are_those_of_a_run_without(model, plain):
    """A drafter that reads hidden states has those of the full conversation in every turn, also of
    one after a turn without it.
    """
    session, draft, ids = model.session(128), drafter(plain("greedy")[1], tapped=TAPPED), []
    for turn, (prompt, reads) in enumerate(zip(PROMPTS, (True, False, True, True), strict=True)):
        options = dict(max_new_tokens=4, stop_tokens=[], **({"draft": draft} if reads else {}))
        reply = session.generate(prompt, **options)
        ids = ids + prompt
        fresh = drafter(plain("greedy")[1], tapped=TAPPED)
        (wanted,) = model.generate([ids], **{**options, "draft": fresh})
        assert reply.tokens == wanted.tokens, turn
        if reads:
            assert reply.usage.cached_tokens == (
                0 if turn in (0, 2) else len(ids) - len(prompt) - 1
            )
            assert same_taps(draft.begun.pop(), fresh.begun.pop())
        ids += reply.tokens


def same_taps(one, other):
    """Whether two drafters have seen the same tokens, and near hidden states."""
    (ids, taps), (wanted, right) = one, other
    return ids == wanted and np.allclose(taps, right, atol=EXACT, rtol=0)


def test_a_cached_prefix_brings_the_drafters_rows(model):
    prompt = np.random.default_rng(9).integers(0, SHALLOW.vocab, 40).tolist()
    draft = drafter([], tapped=TAPPED)
    cache = kj.PrefixCache(model, 2**22, draft=draft)
    options = dict(draft=draft, max_new_tokens=3, stop_tokens=[])
    (cold,) = model.generate([prompt], prefix_cache=cache, **options)
    begun = draft.begun[0]
    draft.begun.clear()
    (warm,) = model.generate([prompt], prefix_cache=cache, **options)
    assert warm.tokens == cold.tokens and warm.usage.cached_tokens == 32
    assert draft.begun[0][0] == begun[0]
    np.testing.assert_array_equal(draft.begun[0][1], begun[1])
    with pytest.raises(kj.PromptError, match="made for another draft"):
        model.generate([prompt], prefix_cache=cache)


def test_a_stream_and_a_full_context_are_those_without_a_draft(model, plain):
    draft = drafter(plain("greedy")[1])
    replies = []
    for options in (dict(draft=draft), {}):
        session = model.session(max_length=14)
        events = list(session.stream(PROMPTS[0], max_new_tokens=50, stop_tokens=[], **options))
        assert events[-1].finish_reason == "length"
        replies.append([event.token for event in events])
    assert replies[0] == replies[1] and len(replies[0]) == 11


PLACES = [
    ("by_group", (1, 4), kj.Placement(keys="helix", helix_block=4, rows="sliced"), TAPPED),
    ("scanned", (2, 2), kj.Placement(expert_axes=("data", "model"), latent="sharded"), None),
]


@pytest.mark.parametrize("walk, mesh, place, tapped", PLACES, ids=["helix", "data"])
def test_greedy_tokens_on_a_mesh_are_those_of_one_device(tmp_path, walk, mesh, place, tapped):
    folder = write(SHALLOW_MESHED, tmp_path / "meshed")
    options = dict(slots=2, max_new_tokens=[9, 5, 12, 2], stop_tokens=[])
    ids = [[token % SHALLOW_MESHED.vocab for token in prompt] for prompt in PROMPTS]
    wanted = kj.load(folder, dtype="float64", chunk=16).generate(ids, **options)
    texts = [prompt + reply.tokens for prompt, reply in zip(ids, wanted, strict=True)]
    model = kj.load(folder, kj.make_mesh(*mesh), place, "float64", walk=walk, chunk=16)
    for right in (99, 1, 0):
        draft = Told(texts, SHALLOW_MESHED.vocab, right, tapped)
        found = model.generate(ids, draft=draft, **options)
        assert [reply.tokens for reply in found] == [reply.tokens for reply in wanted]
        assert [reply.acceptance.accepted[0] for reply in found[:3]] == [min(right, 3)] * 3


@pytest.mark.parametrize(
    "text, n, wanted",
    [
        ([1, 2, 3, 1, 2], 3, [3, 1, 2]),
        ([1, 2, 9, 4, 2, 1, 2], 3, [9, 4, 2, 1, 2]),  # two tokens before one that stood later
        ([1, 2, 9, 4, 2, 1, 2], 1, [1, 2]),
        ([5, 5, 5], 2, [5]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
    ],
)
def test_what_followed_the_longest_ending_that_stood_before(text, n, wanted):
    assert following(np.array(text), n).tolist() == wanted


def test_an_ngram_drafter_changes_no_token_and_is_right_where_text_repeats(model):
    prompt = list(range(SHALLOW.vocab))  # whatever comes next stands in it
    (wanted,) = model.generate([prompt], max_new_tokens=9, stop_tokens=[])
    (found,) = model.generate(
        [prompt], max_new_tokens=9, stop_tokens=[], draft=kj.NgramDraft(most=3)
    )
    assert found.tokens == wanted.tokens and sum(found.acceptance.drafts) > 0
    draft = kj.NgramDraft(n=2, most=3)
    state = draft.begin(2, 8)
    state = draft.extend(
        state, np.array([[1, 2, 3, 1]] * 2), None, np.zeros(2, int), np.array([4, 3])
    )
    greedy, starts = np.zeros(2, np.float32), np.array([4, 3])
    proposal = draft.propose(state, np.array([2, 4]), starts, np.array([2, 3]), 3, greedy, starts)
    assert proposal.lengths.tolist() == [2, 0] and proposal.ids[0, :2].tolist() == [3, 1]
    with pytest.raises(ValueError, match="have no confidence"):
        model.generate([prompt], draft=draft, draft_threshold=0.5)
    with pytest.raises(ValueError, match=r"n must be a whole number in 1..64, got 0\nmost"):
        kj.NgramDraft(n=0, most=65)


def test_wrong_options_of_drafts_are_refused(model):
    draft = drafter([])
    for options, problem in (
        (dict(draft=draft, drafts=4), r"drafts must be a whole number in 1..3, got 4"),
        (dict(draft=draft, draft_rule="best"), "draft_rule must be one of exact, standard, block"),
        (dict(draft_rule="block"), "draft_rule= is for a draft"),
        (dict(drafts=2), "drafts= is for a draft"),
        (dict(draft_threshold=0.5), "draft_threshold= is for a draft"),
        (dict(draft=draft, draft_threshold=2.0), r"draft_threshold must lie in 0..1, got 2.0"),
    ):
        with pytest.raises(kj.PromptError, match=problem):
            model.generate([PROMPTS[0]], **options)
