"""What users hold: `load` gives a `Model`, which computes logits and writes text."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from .analysis.gradients import apply, with_weights
from .analysis.hidden import hidden
from .analysis.score import BATCH, Score, score
from .analysis.weights import Weights
from .checkpoint.hub import folder_of
from .checkpoint.reader import Checkpoint, vision_of
from .compilation.cache import open_cache
from .config.block_sizes import block_sizes
from .config.config import Config
from .config.preprocessor import FILE as PREPROCESSOR_FILE
from .config.preprocessor import preprocessor_of
from .config.vision import NORM_EPS
from .errors import shown
from .files import SHIPPED
from .generation.chat import ChatKeywords, ChatStream, Messages, Reply
from .generation.chat import chat as chat_turn
from .generation.generate import (
    Completion,
    Event,
    GenerateKeywords,
    StreamKeywords,
    generate,
    stream,
)
from .generation.options import method_of
from .generation.prompts import Prompt, Prompts, TextRunner
from .generation.sessions import Session
from .model.declared import read_weights
from .model.implementations import Implementations
from .model.mxfp4 import PLAIN
from .model.state import State
from .numerics import is_whole
from .parallel.mesh import as_mesh, sizes_text
from .parallel.placement import Placement, as_placement
from .runtime.images.encoder import load_encoder
from .runtime.program import make_program
from .runtime.runner import Ids
from .speculation.verify import Verified, commit, verify
from .text.media import check_placeholder
from .text.tokenizer import CONFIG_FILE, RANKS_FILE, Tokenizer

if TYPE_CHECKING:
    Stream = Literal["sum", "mixture"]
else:  # checked by `hidden`
    Stream = Any

# That a checkpoint may do without.
FILES = ("generation_config.json", RANKS_FILE, CONFIG_FILE, PREPROCESSOR_FILE)


@dataclasses.dataclass(frozen=True)
class Model(TextRunner):
    """A decoder ready to run: `logits`, `new_state`, `prefill`, `decode`, and text through
    `generate`, `stream` and `chat`.
    """

    def __repr__(self) -> str:
        mesh = sizes_text(self.program.sizes)
        return f"Model({self.config.layers} layers, {self.dtype}, mesh {mesh}, chunk {self.chunk})"

    @property
    def weights(self) -> Weights:
        """Its weights by name."""
        return Weights(self.program, self.params)

    @method_of(generate)
    def generate(
        self,
        prompts: Prompts,
        *,
        n: int | Sequence[int] = 1,
        session: Session | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> list[Completion]:
        """Text or ids that continue prompts."""
        return generate(self, prompts, n=n, session=session, **options)

    @method_of(stream)
    def stream(
        self, prompt: Prompt, *, session: Session | None = None, **options: Unpack[StreamKeywords]
    ) -> Iterator[Event]:
        """Text or ids that continue one prompt, as they come."""
        return stream(self, prompt, session=session, **options)

    @overload
    def chat(
        self,
        messages: Messages,
        tools: Any = None,
        thinking: bool = True,
        stream: Literal[False] = False,
        *,
        session: Session | None = None,
        **options: Unpack[ChatKeywords],
    ) -> Reply: ...

    @overload
    def chat(
        self,
        messages: Messages,
        tools: Any = None,
        thinking: bool = True,
        *,
        stream: Literal[True],
        session: Session | None = None,
        **options: Unpack[ChatKeywords],
    ) -> ChatStream: ...

    @method_of(chat_turn)
    def chat(
        self,
        messages: Messages,
        tools: Any = None,
        thinking: bool = True,
        stream: bool = False,
        *,
        session: Session | None = None,
        **options: Unpack[ChatKeywords],
    ) -> Reply | ChatStream:
        """A turn of a conversation."""
        return chat_turn(self, messages, tools, thinking, stream, session=session, **options)

    @method_of(score)
    def score(
        self, prompts: Prompts, *, window: int | None = None, batch: int = BATCH
    ) -> list[Score]:
        """The log-probability of each token of given text."""
        return score(self, prompts, window=window, batch=batch)

    @method_of(hidden)
    def hidden(
        self,
        tokens: Ids,
        layers: int | Sequence[int],
        lengths: Ids | None = None,
        *,
        stream: Stream = "sum",
    ) -> Array:
        """Hidden states of prompts."""
        return hidden(self, tokens, layers, lengths, stream=stream)

    @method_of(verify)
    def verify(
        self,
        state: State,
        tokens: Ids,
        lengths: Ids | None = None,
        *,
        layers: Sequence[int] | None = None,
        stream: Stream = "sum",
    ) -> Verified:
        """A few rows a request, not committed."""
        return verify(self, state, tokens, lengths, layers=layers, stream=stream)

    @method_of(commit)
    def commit(self, verified: Verified, accepted: Ids) -> State:
        """The state after some of them."""
        return commit(self, verified, accepted)

    @method_of(apply)
    def apply(
        self, weights: Mapping[str, ArrayLike], tokens: Ids, lengths: Ids | None = None
    ) -> Array:
        """Logits as a function of weights."""
        return apply(self, weights, tokens, lengths)

    @method_of(with_weights)
    def with_weights(self, weights: Mapping[str, ArrayLike]) -> "Model":
        """This model with other weights."""
        return with_weights(self, weights)

    def session(self, max_length: int | None = None) -> Session:
        """A conversation that keeps its state between turns: `generate`, `stream`, `chat`. Its
        caches grow as it does, or are allocated once for `max_length` tokens in all.
        """
        return Session(self, max_length)


def load(
    path: str | os.PathLike = SHIPPED,
    mesh: Mesh | Any = None,
    placement: Placement | Any = None,
    dtype: DTypeLike | None = None,
    *,
    chunk: int | None = None,
    scan: bool | None = None,
    walk: str | None = None,
    implementations: Implementations | None = None,
    unpack: bool = False,
    vision: bool | Any = None,
    vision_norm_eps: float = NORM_EPS,
    progress: bool | None = None,
) -> Model:
    """A `Model` from a Hugging Face folder (config.json, safetensors shards and their index,
    tokenizer files if any): by default `SHIPPED`, the small model of the package; from "owner/name"
    through `huggingface_hub` (extra `hub`), which fetches the files that are read.

    `dtype`: "float32" (default on CPU), "bfloat16" (default elsewhere) or "float64". `chunk`: most
    tokens of a row in one prefill program. `walk`: how programs walk the layers, "unrolled" (one
    program of all), "scanned" (over stacks of equal groups) or "by_group" (a program of each kind
    of group, called in turn); default: by group on accelerators, where a scan copies weights; on
    CPUs scanned for deep models. `scan`: the first two as a boolean. `implementations`: others than
    the fast ones, such as `DEFINITIONS`, or `TRAINING` for gradients. `unpack`: hold MXFP4 experts
    as plain weights, which can be trained, in place of packed. `vision`: load the vision tower
    (default: if the folder has a `vision_config` and a tower); False skips it, and what its part of
    the folder holds. `vision_norm_eps`: the epsilon of the tower's norms, which no file says.
    `progress`: show a bar (default: for loads over a second, on a terminal). All problems in the
    headers are raised in one error before anything is allocated; so is a model that does not fit
    into its devices' memory, with the plan of what each would hold. Each process reads the slices
    of its local devices, once. Compiled programs are kept in the user's cache folder, or where
    `jax_compilation_cache_dir` says (`kimi_jax.compilation.cache`).
    """
    if chunk is not None and not is_whole(chunk, 1, 2**31 - 1):
        raise ValueError(f"chunk must be a positive whole number of tokens, got {shown(chunk)}")
    open_cache()
    mesh = as_mesh(mesh)
    chunk = chunk or block_sizes(mesh.devices.flat[0].platform).prefill_tokens
    placement = as_placement(placement).within(chunk)
    path = folder_of(path, FILES, vision)
    config = Config.from_hf(path)
    tower = vision_of(path, config, vision)
    if tower is None and vision_norm_eps != NORM_EPS:
        raise ValueError("vision_norm_eps is given, and no vision tower is loaded")
    tower = tower and tower.with_eps(vision_norm_eps)
    preprocessor = tower and preprocessor_of(path, tower)
    with Checkpoint(path, config, tower) as checkpoint:
        program = make_program(
            config,
            mesh,
            placement,
            dtype,
            quantization=PLAIN if unpack else checkpoint.quantization,
            scan=scan,
            walk=walk,
            implementations=implementations,
        )
        program.refuse_what_exceeds(1, 1, tower)
        tokenizer = Tokenizer.from_folder(path, config.vocab) if Tokenizer.is_in(path) else None
        if tower and tokenizer:
            check_placeholder(tower.placeholder, tokenizer)
        read = checkpoint.read_unpacked if unpack else checkpoint.read
        params = read_weights(program.declared, placement, mesh, read, progress)
        encoder = tower and load_encoder(tower, mesh, program.dtype, checkpoint.read, progress)
    return Model(
        program, params, tokenizer, chunk=chunk, encoder=encoder, preprocessor=preprocessor
    )
