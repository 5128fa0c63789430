"""A small vocabulary in many scripts, and the tokenizer that it makes."""

import pytest
from trainer import train_ranks

from kimi_jax.text.tokenizer import Tokenizer

TEXT = """The quick brown fox jumps over the lazy dog. 
    It's what they'd say: we've, I'm, you'll, don't.
    A message says role="user" or role="assistant"; the message says what the message says.
    1 22 333 4444 55555 2024-01-31 3.14159 1000000 1000 200 300
今天天气很好，我们去公园散步。今天我们学习中文，明天天气也很好。人工智能模型 Kimi 很好用。
emoji 😀😀 👩‍👩‍👧 café naïve Straße Привет мир, привет! こんにちは 你好 world 你好 World
def encode(text):\r\n\treturn [token for token in text]   \n\n\n        # many        spaces
open close sep think response tools call argument end_of_msg <| |> system message obey
"""
BYTES = {bytes([byte]): byte for byte in range(256)}
RANKS = train_ranks(TEXT, 400)
CONTROLS = """[BOS] [EOS] <|end_of_msg|> <|open|> <|close|> <|sep|>
    <|media_begin|> <|media_content|> <|media_end|> <|media_pad|>""".split()
SPECIAL = {content: 400 + place for place, content in enumerate(CONTROLS)}
SPECIAL |= {"[UNK]": 430, "[PAD]": 431}
TOKENIZER = Tokenizer(RANKS, SPECIAL)
MARKERS = sorted(SPECIAL)
HUGE = pytest.param(10**5_000, id="huge")  # more digits than Python prints
