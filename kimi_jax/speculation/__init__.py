"""Speculative decoding: a drafter proposes tokens, the model verifies them in one step, and what it
accepts is committed.
"""
