"""The public names for type checkers, which do not run `__getattr__`."""

from .analysis.score import Score as Score
from .api import Model as Model
from .api import load as load
from .config.config import Config as Config
from .config.preprocessor import Preprocessor as Preprocessor
from .errors import ChatError as ChatError
from .errors import CheckpointError as CheckpointError
from .errors import ConfigError as ConfigError
from .errors import FileError as FileError
from .errors import ImageError as ImageError
from .errors import PlacementError as PlacementError
from .errors import PromptError as PromptError
from .errors import RequestError as RequestError
from .errors import TokenizerError as TokenizerError
from .files import SHIPPED as SHIPPED
from .generation.chat import ChatStream as ChatStream
from .generation.chat import Reply as Reply
from .generation.generate import Completion as Completion
from .generation.generate import Event as Event
from .generation.prefix_cache import CacheStats as CacheStats
from .generation.prefix_cache import PrefixCache as PrefixCache
from .generation.requests import Usage as Usage
from .generation.sessions import Session as Session
from .model.implementations import DEFINITIONS as DEFINITIONS
from .model.implementations import TRAINING as TRAINING
from .model.implementations import Implementations as Implementations
from .model.state import State as State
from .parallel.mesh import make_mesh as make_mesh
from .parallel.placement import Placement as Placement
from .parallel.reductions import command_buffer_flags as command_buffer_flags
from .parallel.reductions import copy_engine_flags as copy_engine_flags
from .runtime.memory import Plan as Plan
from .runtime.memory import plan as plan
from .runtime.reshard import load_state as load_state
from .runtime.reshard import move as move
from .runtime.sampling import Greedy as Greedy
from .runtime.sampling import Sample as Sample
from .runtime.sampling import TokenLogprob as TokenLogprob
from .speculation.verify import Verified as Verified
from .text.reply_parser import ChatEvent as ChatEvent
from .text.tokenizer import Tokenizer as Tokenizer
from .text.tool_calls import ToolCall as ToolCall
from .vision.patches import ImagePatches as ImagePatches
from .vision.pixels import image_patches as image_patches

__version__: str
