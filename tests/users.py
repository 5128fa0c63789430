"""A user's program, as a type checker sees it: each line that ends in `# wrong` is an error."""

from typing import assert_type

import jax.numpy as jnp
import numpy as np

import kimi_jax as kj

model: kj.Model = kj.load()
kj.load(kj.SHIPPED, dtype="bfloat16", implementations=kj.TRAINING)
kj.load(path=3)  # wrong

outs = model.generate("Alice", max_new_tokens=3, temperature=0.5, min_p=0.1, n=2)
assert_type(outs, list[kj.Completion])
model.generate(["a", "b"], temperature=[0.0, 1.0], seed=[1, 2], stop=[["x"], None], logprobs=3)
model.generate(jnp.array([1, 2]), frequency_penalty=0.5, presence_penalty=0.2)
model.generate([np.array([1, 2]), [3]], sampling=kj.Greedy(), logit_bias={3: 1.0})
model.generate("Alice", max_tokens=3)  # wrong
model.generate("Alice", temperature="hot")  # wrong
model.generate("Alice", stop=3)  # wrong
model.generate(7)  # wrong
model.stream("Alice", n=2)  # wrong
model.stream("Alice", slots=2)  # wrong
for event in model.stream("Alice", top_k=3, trip=2):
    assert_type(event, kj.Event)

messages = [{"role": "user", "content": "Hello"}]
assert_type(model.chat(messages, thinking_effort="medium"), kj.Reply)
assert_type(model.chat(messages, stream=True, tool_choice="none"), kj.ChatStream)
model.chat(messages, thinking_effort="lots")  # wrong
print(model.chat(messages, stream=True).text)  # wrong
model.chat(messages, max_token=3)  # wrong
model.chat("Hello")  # wrong

session = model.session(max_length=64)
assert_type(session.generate("Alice", repetition_penalty=1.1), kj.Completion)
assert_type(session.chat(messages, stream=True), kj.ChatStream)
session.generate("Alice", n=2)  # wrong
session.chat(messages, temprature=1.0)  # wrong

(score,) = model.score("Alice", window=16)
assert_type(score.bits_per_byte, float | None)
verified = model.verify(model.new_state(1, 8), [[1, 2]], layers=[0, 3], stream="mixture")
assert_type(model.commit(verified, [0]), kj.State)
model.commit(verified)  # wrong
model.hidden([[1, 2]], layers=[0, 3], stream="mixture")
model.hidden([[1, 2]], layers="all")  # wrong
model.hidden([[1, 2]], 0, stream="both")  # wrong
tuned = model.with_weights({"norm": model.weights["norm"] * 2})
tuned.apply(tuned.weights.select("*.attention.w_o"), jnp.array([[1, 2]]))

state: kj.State = model.new_state(batch=1, max_length=8)
tokenizer: kj.Tokenizer | None = model.tokenizer
print(kj.plan("k3.1", {"data": 1, "model": 8}, batch=12, context=131072).total_bytes)
kj.Implementations(kda="recurrent")
print(kj.Nothing)  # wrong
