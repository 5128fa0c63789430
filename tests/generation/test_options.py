"""Options of requests: one value or one a prompt, what is refused, what help says."""

import dataclasses
import inspect

import numpy as np
import pytest
from models import SHALLOW, compilations, write, write_talking

import kimi_jax as kj
from kimi_jax.generation import chat, prompts
from kimi_jax.generation import generate as g
from kimi_jax.generation.option_checks import RequestKeywords, of_one_prompt
from kimi_jax.generation.options import Options, option_help
from kimi_jax.generation.requests import PromptIds

SAMPLING = dict(max_new_tokens=6, stop_tokens=[])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options") / "model"
    return kj.load(write(SHALLOW, folder), dtype="float32", chunk=16)


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([[]], {}, "prompt 0 is empty"),
        ([[1], [83]], {}, "prompt 1: 83 is not a token id"),
        (["text"], {}, "no tokenizer"),
        ([[1]], {"temperature": -1.0}, "temperature"),
        ([[1]], {"temperature": float("nan")}, "temperature"),
        ([[1]], {"top_p": 1.5}, "top_p"),
        ([[1]], {"top_k": -1}, "top_k"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[1]], {"sampling": kj.Greedy(), "top_k": 3}, "excludes"),
        ([[1]], {"seed": [1, 2]}, "one for each of the 1 prompts"),
        ([[1]], {"stop": "x"}, "tokenizer"),
        ([[1]], {"stop_tokens": [99]}, "99 is not a token id"),
        ([[1]], {"logprobs": 1000}, "logprobs"),
        ([[1]], {"slots": 0}, "slots must be"),
        ([[1]], {"trip": 1000}, "trip must be"),
        ([[1]], {"min_new_tokens": 65}, "min_new_tokens must lie in 0..max_new_tokens"),
        ([[1]], {"logit_bias": {99: 1.0}}, "logit_bias: 99: 1.0 is not an id"),
        ([[1]], {"logit_bias": {1: float("nan")}}, "logit_bias: 1: nan"),
        ([-1, 2], {}, "prompt 0: -1 is not a token id"),
        ([1, [2]], {}, "mix token ids"),
    ],
)
def test_bad_requests_are_refused_by_name(model, prompts, options, message):
    with pytest.raises(kj.PromptError, match=message):
        model.generate(prompts, **options)


def checked(model, count=1, **options):
    """The options of so many prompts, below the signatures, whose types the tests enforce and
    users' programs do not.
    """
    slots, trip, n = (options.pop(name, 1) for name in ("slots", "trip", "n"))
    prompts = lambda: [[1]] * count  # noqa: E731
    owners = {name: options.pop(name, None) for name in ("cache", "session")}
    requests, _ = g._prepare(
        model,
        prompts,
        Options(**options),
        n=n,
        slots=slots,
        trip=trip,
        drafting=g.NO_DRAFT,
        **owners,
    )
    return [request.options for request in requests]


def test_options_of_the_wrong_type_are_named_at_once(model):
    with pytest.raises(kj.PromptError) as error:
        checked(
            model, max_new_tokens=2.5, seed=None, stop=5, stop_tokens=5, logprobs=None, cache={}
        )
    names = ("max_new_tokens", "seed", "stop must", "stop_tokens", "logprobs", "prefix_cache must")
    assert all(name in str(error.value) for name in names)
    with pytest.raises(kj.PromptError, match="prompts must be"):
        prompts.as_list(7)
    problems = []
    prompts.encode(model, [b"x"], PromptIds([]), problems)
    assert problems == ["prompt 0 must be text or token ids, got b'x'"]


WHOLE = [0, 1, -1, np.int32(1), np.uint8(1), np.int64(2**40), 2**31 - 1, 2**31, 10**400, -(10**400),
         10**5000]  # fmt: skip


REAL = [0.5, np.float64(0.5), np.float32(-1), float("nan"), float("inf"), float("-inf"), 1e39]


OTHER = [
    "x",
    b"x",
    True,
    np.True_,
    1j,
    np.complex64(1),
    np.array(3),
    np.zeros((2, 2)),
    [0.5, 1],
    {1},
]


PLAIN = {
    "max_new_tokens": 1, "min_new_tokens": 0, "temperature": 0.0, "top_p": 1.0, "top_k": 0,
    "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "seed": 0, "logprobs": False, "n": 1, "slots": 1, "trip": 1, "stop": None, "stop_tokens": None,
    "logit_bias": None,
}  # fmt: skip


SOUND = {  # which of the values above an option takes
    "max_new_tokens": WHOLE[1:2] + WHOLE[3:5] + WHOLE[6:7],
    "min_new_tokens": WHOLE[:2] + WHOLE[3:5],
    "temperature": WHOLE[:2] + WHOLE[3:8] + REAL[:2],
    "top_p": WHOLE[:2] + WHOLE[3:5] + REAL[:2],
    "min_p": WHOLE[:2] + WHOLE[3:5] + REAL[:2],
    "repetition_penalty": WHOLE[1:2] + WHOLE[3:8] + REAL[:2],
    "frequency_penalty": WHOLE[:8] + REAL[:3],
    "presence_penalty": WHOLE[:8] + REAL[:3],
    "n": WHOLE[1:2] + WHOLE[3:5],
    "top_k": WHOLE[:2] + WHOLE[3:5] + WHOLE[6:7],
    "seed": WHOLE[:2] + WHOLE[3:5] + WHOLE[6:7],
    "logprobs": [*WHOLE[:2], *WHOLE[3:5], True],
    "slots": WHOLE[1:2] + WHOLE[3:5],
    "trip": WHOLE[1:2] + WHOLE[3:5],
    "stop": [],
    "stop_tokens": [OTHER[-1]],
    "logit_bias": [],
}


@pytest.mark.parametrize("name", PLAIN)
def test_every_value_of_an_option_runs_or_is_one_error_that_names_it(model, name):
    """Huge, negative, of NumPy, not a number at all: below the signatures, which the tests enforce
    and users' programs do not.
    """
    for value in WHOLE + REAL + OTHER:
        options = PLAIN | {name: value}
        if any(value is sound for sound in SOUND[name]):
            assert len(checked(model, **options)) == 1
        else:
            with pytest.raises(kj.PromptError, match=name) as error:
                checked(model, **options)
            assert len(str(error.value)) < 400


def test_all_bad_prompts_are_named_at_once(model):
    with pytest.raises(kj.PromptError, match=r"(?s)prompt 0 is empty.*prompt 2: -4"):
        model.generate([[], [1], [-4]])


def test_numbers_are_such_as_float32_holds(model):
    for strategy in (dict(temperature=1e39), dict(repetition_penalty=1e-46)):
        with pytest.raises(kj.PromptError, match=f"{next(iter(strategy))} must be"):
            kj.Sample(**strategy)
    with pytest.raises(kj.PromptError, match="logit_bias: 3: 1e"):
        model.generate([[1]], logit_bias={3: 1e300})
    (options,) = checked(model, logit_bias={3: np.float32(99)})
    assert options.logit_bias == ((3, 99.0),)


def test_options_compile_few_programs(model):
    """Whatever the stop ids, the log-probabilities asked for and steps a call, up to some size."""
    model.generate([[3, 1, 4]], logprobs=4, **SAMPLING)

    def others():
        model.generate([[5, 4]], max_new_tokens=3, stop_tokens=[1, 2, 3], logprobs=3, trip=5)
        model.generate([[5, 4]], max_new_tokens=3, stop_tokens=range(8), logprobs=4)

    assert compilations(others)[0] == 0


# One value, or one a prompt


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    """A model that reads and writes text."""
    return kj.load(write_talking(tmp_path_factory.mktemp("talking") / "model"))


MIXED = {
    "max_new_tokens": [9, 3, 5, 7],
    "min_new_tokens": [0, 2, 0, 4],
    "temperature": [0.0, 1.0, 2.0, 0.0],
    "top_p": [1.0, 0.9, 1.0, 1.0],
    "top_k": [0, 5, 0, 3],
    "min_p": [0.0, 0.01, 0.1, 0.0],
    "repetition_penalty": [1.0, 1.3, 1.0, 5.0],
    "frequency_penalty": [0.0, 0.7, -0.4, 0.0],
    "presence_penalty": [1.5, 0.0, 0.3, 0.0],
    "seed": [3, 4, 5, 6],
    "stop": [["e"], None, ["a", "t"], []],
    "stop_tokens": [None, [5, 9], [], range(40)],
    "logprobs": [True, 3, False, 1],
    "logit_bias": [None, {7: 2.0}, {300: -100.0, 9: 4.0}, {}],
}
PROMPTS = ["Alice was", "The Queen", [7, 8, 9], "Off with"]


def replies(model, prompts, **options):
    return [
        (out.tokens, out.text, out.finish_reason, said(out.logprobs))
        for out in model.generate(prompts, **options)
    ]


def said(logprobs):
    """Log-probabilities to four places: another batch is another program."""
    return logprobs and [(round(x.logprob, 4), [token for token, _ in x.top]) for x in logprobs]


@pytest.mark.parametrize("slots", [2, 8])
def test_a_batch_of_mixed_options_equals_its_requests_one_by_one(talking, slots):
    mixed = replies(talking, PROMPTS, slots=slots, **MIXED)
    for i, prompt in enumerate(PROMPTS):
        alone = {name: values[i] for name, values in MIXED.items()}
        assert replies(talking, [prompt], **alone) == [mixed[i]]
    assert len({reason for _, _, reason, _ in mixed}) == 2


def test_sampling_may_be_one_a_prompt_too(talking):
    strategies = [kj.Greedy(), kj.Sample(1.0, top_k=4), kj.Sample(2.0), kj.Greedy()]
    options = dict(max_new_tokens=5, stop_tokens=[])
    mixed = replies(talking, PROMPTS, sampling=strategies, **options)
    for i, prompt in enumerate(PROMPTS):
        assert replies(talking, [prompt], sampling=strategies[i], **options) == [mixed[i]]


@pytest.mark.parametrize(
    "name, value, wanted",
    [
        ("stop_tokens", [1, 2], [{1, 2}, {1, 2}]),
        ("stop_tokens", [[1], [2, 3]], [{1}, {2, 3}]),
        ("stop_tokens", [None, []], [set(SHALLOW.eos), set()]),
        ("stop_tokens", np.array([[1], [2]]), [{1}, {2}]),
        ("stop_tokens", [{1}, (2,)], [{1}, {2}]),
        ("stop_tokens", {1, 2}, [{1, 2}, {1, 2}]),
        ("stop_tokens", [], [set(), set()]),
    ],
)
def test_a_list_of_lists_of_ids_is_one_a_prompt(model, name, value, wanted):
    assert [options.stop_ids for options in checked(model, 2, **{name: value})] == wanted


@pytest.mark.parametrize(
    "value, wanted",
    [
        ("ab", [("ab",)] * 2),
        (["a", "b"], [("a", "b")] * 2),
        ([["a"], ["b", "c"]], [("a",), ("b", "c")]),
        ([None, ["b"]], [(), ("b",)]),
        (("a",), [("a",)] * 2),
        ([], [()] * 2),
    ],
)
def test_a_list_of_lists_of_strings_is_one_a_prompt(talking, value, wanted):
    assert [options.stop for options in checked(talking, 2, stop=value)] == wanted


def test_values_of_a_prompt_are_checked_each(model):
    with pytest.raises(kj.PromptError) as error:
        checked(
            model,
            2,
            temperature=[0.0, -1.0],
            max_new_tokens=[3, 0],
            min_new_tokens=[4, 0],
            logit_bias=[None, 3],
            sampling=[kj.Greedy(), "x"],
            stop_tokens=[[1], 2],
        )
    text = str(error.value)
    for part in ("temperature must", "got -1.0", "min_new_tokens must", "got 4", "got 0",
                 "logit_bias must", "sampling must", "stop_tokens must"):  # fmt: skip
        assert part in text
    with pytest.raises(kj.PromptError, match="top_k must be one value, or one for each of the 2"):
        checked(model, 2, top_k=[1, 2, 3])


# Help


def test_help_lists_every_option_with_its_default():
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    released = {"max_new_tokens": 2048, "temperature": 1.0, "top_p": 0.95}
    for owner in (kj.Model, kj.Session):
        for name in ("generate", "stream", "chat"):
            method = getattr(owner, name)
            parameters = inspect.signature(method).parameters
            for option, default in defaults.items():
                wanted = {**defaults, **released}[option] if name == "chat" else default
                assert parameters[option].default == wanted
                assert f"- `{option}`: " in method.__doc__
            assert next(iter(parameters)) == "self"
            assert ("session" in parameters) == (owner is kj.Model)
    assert all(option_help(option) for option in defaults)


def test_an_option_that_is_not_one_is_a_type_error_with_the_name_that_was_meant(model):
    session = model.session()
    for call in (model.generate, model.stream, session.generate, session.stream):
        with pytest.raises(TypeError, match="no option temprature; did you mean temperature"):
            call([1], temprature=1.0)
        with pytest.raises(
            TypeError, match=r"(?s)max_tokens; did you mean max_new_tokens.*no option x$"
        ):
            call([1], max_tokens=3, x=1)
    with pytest.raises(TypeError, match="num_return_sequences; did you mean n"):
        model.generate([1], num_return_sequences=3)
    with pytest.raises(TypeError, match=r"stream\(\) has no option n$"):
        model.stream([1], n=2)


def test_the_keywords_for_type_checkers_are_the_options():
    """Each option of `Options`, and of the functions that users call, under the same name."""
    assert list(RequestKeywords.__annotations__) == list(Options.__annotations__)
    for function, keywords, others in (
        (g.generate, g.GenerateKeywords, {"prompts", "n", "session"}),
        (g.stream, g.StreamKeywords, {"prompt", "session"}),
        (chat.chat, chat.ChatKeywords, {"messages", "tools", "thinking", "stream", "session"}),
    ):
        named = set(inspect.signature(function).parameters) - {"model"} - others
        assert named == set(keywords.__annotations__)


def test_a_list_of_one_value_is_that_value_in_a_turn_of_chat():
    given = {"stop_tokens": [[1, 2]], "stop": [None], "temperature": [0.5], "sampling": [None]}
    given |= {"logit_bias": [{3: 1.0}], "max_new_tokens": 4, "seed": [1, 2]}
    expected = {"stop_tokens": [1, 2], "stop": None, "temperature": 0.5, "sampling": None}
    expected |= {"logit_bias": {3: 1.0}, "max_new_tokens": 4, "seed": [1, 2]}
    assert of_one_prompt(given) == expected
    shared = {"stop_tokens": [1], "stop": ["."]}  # of all prompts: not one a prompt
    assert of_one_prompt(shared) == shared
