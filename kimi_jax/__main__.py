"""`python -m kimi_jax` is the command `kimi-jax`."""

import sys

from .cli.main import main

sys.exit(main())
