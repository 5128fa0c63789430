"""Released checkpoints on disk: names, headers, reading and writing."""

from .names import hf_shapes, shapes
from .reader import Checkpoint
from .writer import random_tensors, save_hf, to_hf

__all__ = ["Checkpoint", "hf_shapes", "random_tensors", "save_hf", "shapes", "to_hf"]
