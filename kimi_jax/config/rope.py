"""Rotary embedding of a draft: its frequencies, with YaRN (arXiv 2309.00071) where asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from .keys import POSITIVE, REQUIRED, SIZE, TABLE, Field, Kind, is_positive
from .section import Section

_TYPE = Kind("'default' or 'yarn'", lambda v: isinstance(v, str) and v in ("default", "yarn"))
_MSCALE = Kind("a number of 0 or more", lambda v: v == 0 or is_positive(v), float)
_YARN = (
    Field("factor", ("factor",), POSITIVE),
    Field("original", ("original_max_position_embeddings",), SIZE),
    Field("beta_fast", ("beta_fast",), POSITIVE, default=32.0),
    Field("beta_slow", ("beta_slow",), POSITIVE, default=1.0),
)
_MSCALES = (
    Field("mscale", ("mscale",), _MSCALE, default=None),
    Field("mscale_all", ("mscale_all_dim",), _MSCALE, default=None),
)
_FACTOR = Field("attention_factor", ("attention_factor",), POSITIVE, default=None)


@dataclass(frozen=True)
class Rope:
    """Rotation of `dim` numbers of a head. `cos_factor` multiplies sines and cosines,
    `score_factor` scores; a `factor` of 1 is plain rotation.
    """

    dim: int
    theta: float
    factor: float = 1.0
    original: int = 1
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    cos_factor: float = 1.0
    score_factor: float = 1.0
    is_interleaved: bool = True  # pairs (2j, 2j + 1); else (j, j + dim / 2)

    @property
    def frequencies(self) -> Float[np.ndarray, " half"]:
        """Radians per position of each pair: slow ones are divided by `factor`, fast ones stay, and
        between `beta_fast` and `beta_slow` turns within the original context they are blended.
        """
        pairs = np.arange(self.dim // 2)
        plain = self.theta ** (-2.0 * pairs / self.dim)
        if self.factor == 1:
            return plain
        turns = lambda n: (  # noqa: E731
            self.dim * math.log(self.original / (2 * math.pi * n)) / (2 * math.log(self.theta))
        )
        low = max(math.floor(turns(self.beta_fast)), 0)
        high = min(math.ceil(turns(self.beta_slow)), self.dim - 1)
        width = high - low if high != low else 0.001
        slow = np.clip((pairs - low) / width, 0, 1)
        return plain / self.factor * slow + plain * (1 - slow)


def yarn_factor(factor: float, scale: float) -> float:
    """m(s) = 0.1 s ln(factor) + 1: how much sharper attention is made over a longer context."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def read_rope(top: Section, form: str, dim: int | None) -> Rope | None:
    """The rotation that a file names; None where something is wrong with it.

    Latent attention takes m(mscale) / m(mscale_all_dim) on sines and cosines and
    m(mscale_all_dim)^2 on scores, as DeepSeek's; grouped-query attention m on sines and cosines.
    """
    count = len(top.problems)
    named = Field("rope", ("rope_parameters", "rope_scaling"), TABLE, default={})
    table = Section(top.read(named) or {}, top.problems, "rope_parameters.")
    kind = table.read(Field("kind", ("rope_type", "type"), _TYPE, default="default"))
    theta = _theta(top, table)
    known = {"rope_type", "type", "rope_theta"}
    values: dict[str, Any] = {}
    if kind == "yarn":
        fields = (*_YARN, *_MSCALES, *(() if form == "mla" else (_FACTOR,)))
        values = table.read_all(fields)
        known |= {key for field in fields for key in field.keys}
    table.check_unknown(known)
    if len(top.problems) > count or dim is None:
        return None
    factors = _factors(values, form) if values else (1.0, 1.0)
    sizes = {field.name: values[field.name] for field in _YARN if values}
    return Rope(dim, theta, **sizes, cos_factor=factors[0], score_factor=factors[1],
                is_interleaved=form == "mla")  # fmt: skip


def _theta(top: Section, table: Section) -> Any:
    """The base of the frequencies, which stands at either level."""
    inner, outer = (
        section.read(Field("theta", ("rope_theta",), POSITIVE, default=None))
        for section in (table, top)
    )
    if inner is None and outer is None:
        return top.read(Field("theta", ("rope_theta",), POSITIVE, default=REQUIRED))
    if inner is not None and outer is not None and inner != outer:
        table.note("rope_theta", f"{inner}, the top level has {outer}")
    return outer if inner is None else inner


def _factors(values: dict[str, Any], form: str) -> tuple[float, float]:
    """What multiplies sines and cosines, and scores."""
    factor, one, every = values["factor"], values["mscale"], values["mscale_all"]
    if form == "mla":
        one, every = (1.0 if one is None else one), every or 0.0
        m = yarn_factor(factor, every)
        return yarn_factor(factor, one) / m, m * m
    if values["attention_factor"] is not None:
        return values["attention_factor"], 1.0
    if one and every:
        return yarn_factor(factor, one) / yarn_factor(factor, every), 1.0
    return yarn_factor(factor, 1.0), 1.0
