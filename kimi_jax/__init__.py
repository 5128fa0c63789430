"""Kimi K3 and K3.1-Pro in JAX: from a checkpoint to text, on one device or a mesh of them.

One vocabulary runs through the package; a capital letter is a dim or its size:

    B batch rows           T new tokens in this call  S cache slots          D hidden
    H heads                K key dim of a head        V value dim of a head  R cached latent row
    Q query latent         C latent, channels, chunk  E routed experts       A active per token
    L expert latent        F ffn width                Z vocabulary           N residual-bank rows
    W conv taps            P rows of the residual stream held by a rank      X (row, expert) pairs
    I index dim            J index heads              U keys kept            G groups of a stack

The path of a prompt, each arrow one call to jump into: cli -> Tokenizer.encode -> generate ->
Program.step (jit, shard_map) -> Kimi -> Stack -> Layer [mix -> KDA | MLA -> mix -> MLP | MoE] ->
norm, head -> sample -> TextBuilder.
"""

from .api import Model, load
from .config.config import Config
from .errors import (
    ChatError,
    CheckpointError,
    ConfigError,
    PlacementError,
    PromptError,
    RequestError,
    TokenizerError,
)
from .generation.chat import ChatStream, Reply
from .generation.generate import Completion, Event
from .generation.prefix_cache import CacheStats, PrefixCache
from .generation.requests import Usage
from .generation.sessions import Session
from .parallel.mesh import make_mesh
from .parallel.placement import Placement
from .parallel.reductions import copy_engine_flags
from .runtime.memory import Plan, plan
from .runtime.reshard import load_state, move
from .runtime.sampling import Greedy, Sample, TokenLogprob
from .text.reply_parser import ChatEvent
from .text.tool_calls import ToolCall

__all__ = [
    "CacheStats",
    "ChatError",
    "ChatEvent",
    "ChatStream",
    "CheckpointError",
    "Completion",
    "Config",
    "ConfigError",
    "Event",
    "Greedy",
    "Model",
    "Placement",
    "PlacementError",
    "Plan",
    "PrefixCache",
    "PromptError",
    "Reply",
    "RequestError",
    "Sample",
    "Session",
    "TokenLogprob",
    "TokenizerError",
    "ToolCall",
    "Usage",
    "copy_engine_flags",
    "load",
    "load_state",
    "make_mesh",
    "move",
    "plan",
]
