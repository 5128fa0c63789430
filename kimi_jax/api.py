"""What users hold: `load` gives a `Model`, which computes logits and writes text."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh
from jax.typing import DTypeLike

from .checkpoint.reader import Checkpoint
from .compilation.cache import open_cache
from .config.block_sizes import block_sizes
from .config.config import Config
from .errors import shown
from .generation.chat import ChatStream, Reply, chat
from .generation.generate import Completion, Event, generate, stream
from .generation.options import method_of
from .generation.prompts import TextRunner
from .generation.sessions import Session
from .model.implementations import Implementations
from .numerics import is_whole
from .parallel.mesh import as_mesh
from .parallel.placement import Placement, as_placement
from .runtime.program import make_program
from .runtime.runner import load_weights
from .text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Model(TextRunner):
    """A decoder ready to run: `logits`, `new_state`, `prefill`, `decode`, and text through
    `generate`, `stream` and `chat`.
    """

    @method_of(generate)
    def generate(self, prompts: Any, **options: Any) -> list[Completion]:
        """Text or ids that continue prompts."""
        return generate(self, prompts, **options)

    @method_of(stream)
    def stream(self, prompt: Any, **options: Any) -> Iterator[Event]:
        """Text or ids that continue one prompt, as they come."""
        return stream(self, prompt, **options)

    @method_of(chat)
    def chat(
        self,
        messages: Any,
        tools: Any = None,
        thinking: bool = True,
        stream: bool = False,
        **options: Any,
    ) -> Reply | ChatStream:
        """A turn of a conversation."""
        return chat(self, messages, tools, thinking, stream, **options)

    def session(self, max_length: int | None = None) -> Session:
        """A conversation that keeps its state between turns: `generate`, `stream`, `chat`. Its
        caches grow as it does, or are allocated once for `max_length` tokens in all.
        """
        return Session(self, max_length)


def load(
    path: str | os.PathLike,
    mesh: Mesh | Any = None,
    placement: Placement | Any = None,
    dtype: DTypeLike | None = None,
    *,
    chunk: int | None = None,
    scan: bool | None = None,
    walk: str | None = None,
    forms: Implementations | None = None,
    progress: bool | None = None,
) -> Model:
    """A `Model` from a Hugging Face folder (config.json, safetensors shards and their index,
    tokenizer files if any).

    `dtype`: "float32" (default on CPU), "bfloat16" (default elsewhere) or "float64". `chunk`: most
    tokens of a row in one prefill program. `walk`: how programs walk the layers, "unrolled" (one
    program of all), "scanned" (over stacks of equal groups) or "by_group" (a program of each kind
    of group, called in turn); default: by group on accelerators, where a scan copies weights; on
    CPUs scanned for deep models. `scan`: the first two as a boolean. `forms`: plain definitions in
    place of fast implementations.
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
    config = Config.from_hf(path)
    with Checkpoint(path, config) as checkpoint:
        program = make_program(
            config,
            mesh,
            placement,
            dtype,
            quantization=checkpoint.quantization,
            scan=scan,
            walk=walk,
            implementations=forms,
        )
        program.refuse_what_exceeds(batch=1, context=1)
        tokenizer = Tokenizer.from_folder(path, config.vocab) if Tokenizer.is_in(path) else None
        weights = load_weights(program, checkpoint.read, progress)
    return Model(program, weights, tokenizer, chunk=chunk)
