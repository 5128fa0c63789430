"""The options of a request: what they are called and what they mean. Imports nothing heavy: the
command shows them too.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from ..errors import meant

Function = TypeVar("Function", bound=Callable)

# Defaults of a conversation: those of the released model, and a bound.
CHAT_TEMPERATURE = 1.0
CHAT_TOP_P = 0.95
CHAT_THINKING_EFFORT = "max"
CHAT_MAX_NEW_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a request. `generate` takes for each one value for all prompts, or a list with one
    value a prompt. For `stop` a list of strings is one value, and for `stop_tokens` a list of ids:
    a list with one value a prompt holds lists, or None for a prompt that has the default.

    - `max_new_tokens`: most tokens to generate.
    - `min_new_tokens`: no stop id and no stop string ends a reply before this many tokens; the end
      of the context does.
    - `temperature`: divides the logits before sampling; 0 is greedy decoding.
    - `top_p`: nucleus sampling: the smallest set of tokens with this total probability; 1: all.
    - `top_k`: sample from this many most probable tokens; 0: all.
    - `min_p`: drop tokens less than this many times as probable as the most probable one; 0: none.
    - `repetition_penalty`: make tokens of prompt and reply less likely: divides their positive
      logits, multiplies negative ones; 1: no change.
    - `frequency_penalty`: subtracted from a token's logit for each time that the reply holds it;
      0: no change.
    - `presence_penalty`: subtracted once from the logit of each token that the reply holds; 0: no
      change.
    - `sampling`: `Greedy()` or `Sample(...)` in place of the options before it.
    - `seed`: seed of the random generator, 0 to 2^31 - 1: the same seed gives the same tokens.
    - `stop`: stop strings, or one of them, not part of the reply. The one that is complete first in
      the text decides, however the text was split into tokens.
    - `stop_tokens`: stop ids, not part of the reply; None: the config's end ids, []: none.
    - `logprobs`: True reports each token's log-probability, a number also that many best tokens.
    - `logit_bias`: numbers that are added to the logits of ids, a mapping from id to number.
    """

    max_new_tokens: Any = 64
    min_new_tokens: Any = 0
    temperature: Any = 0.0
    top_p: Any = 1.0
    top_k: Any = 0
    min_p: Any = 0.0
    repetition_penalty: Any = 1.0
    frequency_penalty: Any = 0.0
    presence_penalty: Any = 0.0
    sampling: Any = None
    seed: Any = 0
    stop: Any = None
    stop_tokens: Any = None
    logprobs: Any = False
    logit_bias: Any = None


# What other libraries call an option.
_OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "num_return_sequences": "n",
    "num_samples": "n",
    "do_sample": "temperature",
    "eos_token_id": "stop_tokens",
    "stop_token_ids": "stop_tokens",
    "stop_strings": "stop",
    "reasoning_effort": "thinking_effort",
}


def make_options(
    given: Mapping[str, Any], function: str, others: Collection[str] = (), **defaults: Any
) -> Options:
    """The options of a call of `function`, with its `defaults`. Raises one TypeError that lists
    every name that is neither an option nor one of its `others`, with the name that was meant.
    """
    names = [field.name for field in dataclasses.fields(Options)]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise TypeError("\n".join(_unknown(name, function, [*names, *others]) for name in unknown))
    return Options(**{**defaults, **given})


def _unknown(name: str, function: str, names: Collection[str]) -> str:
    other = _OTHER_NAMES.get(name)
    hint = meant(other if other in names else name, names)
    return f"{function}() has no option {name}{hint}"


def described(**defaults: Any) -> Callable[[Function], Function]:
    """Decorates a function that takes `Options` as `**options`: its help lists them, with their
    defaults or with those of the function where it has others.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(field.name, field.default),
            )
            for field in dataclasses.fields(Options)
        ]
        function.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore
        function.__doc__ = f"{inspect.getdoc(function)}\n\n{inspect.getdoc(Options)}"
        return function

    return decorate


def method_of(function: Callable, without: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Decorates a method that hands its arguments on to a function, with itself or its model as the
    first: it has the function's help, but for the parameters `without`.
    """

    def decorate(method: Function) -> Function:
        signature = inspect.signature(function)
        first, *rest = signature.parameters.values()
        kept = [p for p in rest if p.name not in without]
        method.__signature__ = signature.replace(  # pyright: ignore
            parameters=[first.replace(name="self", annotation=inspect.Parameter.empty), *kept]
        )
        method.__doc__ = f"{inspect.getdoc(method)}\n\n{inspect.getdoc(function)}"
        return method

    return decorate


def option_help(name: str) -> str:
    """What the list of options says of one, on one line."""
    text = inspect.getdoc(Options) or ""
    found = re.search(rf"^- `{name}`: (.*?)(?=^- |\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()).rstrip(".") if found else ""
