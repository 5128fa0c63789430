"""The trainer of tokenizers, which is a script and not part of the package."""

import importlib.util
from pathlib import Path

_FILE = Path(__file__).parents[1] / "scripts" / "train_tokenizer.py"
_SPEC = importlib.util.spec_from_file_location("train_tokenizer", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
train_ranks = _MODULE.train_ranks
