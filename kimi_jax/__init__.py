"""Kimi K3 and K3.1-Pro in JAX: from a checkpoint to text, on one device or a mesh of them.

One vocabulary runs through the package; a capital letter is a dim or its size:

    B batch rows           T new tokens in this call  S cache slots          D hidden
    H heads                K key dim of a head        V value dim of a head  R cached latent row
    Q query latent         C latent, channels, chunk  E routed experts       A active per token
    L expert latent        F ffn width                Z vocabulary           N residual-bank rows
    W conv taps            P rows of the residual stream held by a rank      X (row, expert) pairs
    I index dim            J index heads              U keys kept            G groups of a stack

The path of a prompt, each arrow one call to jump into:

    text to ids   cli -> Model.generate -> generate -> encode -> Tokenizer.encode
    schedule      generate -> engine.run
    prefill       a chunk a call: Runner.advance -> Program.advance -> Program.step -> Kimi
    decode        n steps a call: Program.decode_steps -> Kimi.head_logits -> sample -> Kimi
    the model     Kimi -> Stack -> Layer [mix -> KDA | MLA -> mix -> MLP | MoE] -> mix -> norm
    ids to text   TextBuilder, a token at a time
    an image      Model.encode_images -> ImageEncoder -> Encoder [Tower -> merge -> Projector]

`Program.step` and `Program.decode_steps` are the compiled functions: jit of a shard_map.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {  # public name: the module that holds it
    "Acceptance": "generation.requests",
    "CacheStats": "generation.prefix_cache",
    "ChatError": "errors",
    "ChatEvent": "text.reply_parser",
    "ChatStream": "generation.chat",
    "CheckpointError": "errors",
    "Completion": "generation.generate",
    "Config": "config.config",
    "ConfigError": "errors",
    "DEFINITIONS": "model.implementations",
    "DraftConfig": "config.draft",
    "Drafter": "speculation.drafter",
    "Event": "generation.generate",
    "FileError": "errors",
    "Greedy": "runtime.sampling",
    "ImageError": "errors",
    "ImagePatches": "vision.patches",
    "Implementations": "model.implementations",
    "Model": "api",
    "NgramDraft": "speculation.ngram",
    "Placement": "parallel.placement",
    "PlacementError": "errors",
    "Plan": "runtime.memory",
    "PrefixCache": "generation.prefix_cache",
    "Preprocessor": "config.preprocessor",
    "PromptError": "errors",
    "PromptRows": "runtime.images.rows",
    "Proposal": "speculation.drafter",
    "Reply": "generation.chat",
    "RequestError": "errors",
    "SHIPPED": "files",
    "Sample": "runtime.sampling",
    "Score": "analysis.score",
    "Session": "generation.sessions",
    "State": "model.state",
    "TRAINING": "model.implementations",
    "TokenLogprob": "runtime.sampling",
    "Tokenizer": "text.tokenizer",
    "TokenizerError": "errors",
    "ToolCall": "text.tool_calls",
    "Usage": "generation.requests",
    "Verified": "speculation.verify",
    "VisionConfig": "config.vision",
    "command_buffer_flags": "parallel.reductions",
    "copy_engine_flags": "parallel.reductions",
    "image_patches": "vision.pixels",
    "load": "api",
    "load_draft": "speculation.draft",
    "load_state": "runtime.reshard",
    "make_mesh": "parallel.mesh",
    "move": "runtime.reshard",
    "plan": "runtime.memory",
}
__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for: importing the package costs nothing."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names: what the package imports is not among them."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
