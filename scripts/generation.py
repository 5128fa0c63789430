"""What generation costs on this machine: tokens a second by slots, programs compiled for prompts of
many lengths, and the time to a first token where a prefix is cached. Ratios are of one run.

    python scripts/generation.py                     # the shipped model
    python scripts/generation.py PATH --devices 8    # a model in a folder, on 8 CPU devices
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from book import SHIPPED

import kimi_jax as kj

SLOTS = (1, 4, 8, 16)
COMPILED = "/jax/core/compile/backend_compile_duration"


def prompts(model: kj.Model, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.config.vocab, n).tolist() for n in lengths]


def run(model: kj.Model, many: list[list[int]], new: int, **options) -> float:
    """Seconds to continue all prompts."""
    begun = time.perf_counter()
    model.generate(many, max_new_tokens=new, stop_tokens=[], progress=False, **options)
    return time.perf_counter() - begun


def compilations(action: Callable) -> list[float]:
    """The seconds of each program that an action compiles."""
    found: list[float] = []

    def listen(name: str, seconds: float, **_) -> None:
        if name == COMPILED:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        action()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return found


def throughput(model: kj.Model, length: int, new: int, repeats: int) -> None:
    """Tokens a second with few and many slots, in turns."""
    many = prompts(model, [length] * 2 * max(SLOTS))
    for slots in SLOTS:
        run(model, many[: 2 * slots], new, slots=slots)
    rounds = [[run(model, many, new, slots=slots) for slots in SLOTS] for _ in range(repeats)]
    medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
    print(f"\n{len(many)} prompts of {length} tokens, {new} new tokens each")
    for slots, seconds in zip(SLOTS, medians, strict=True):
        speed, ratio = len(many) * new / seconds, medians[0] / seconds
        print(f"  {slots:3d} slots {speed:10,.0f} tokens/s {ratio:6.2f}x")


def compiled(model: kj.Model) -> None:
    """Programs compiled by 64 prompts of 1 to 500 tokens, and by 64 others."""
    lengths = np.random.default_rng(1).integers(1, 501, 64).tolist()
    for what, seed in (("64 prompts of 1 to 500 tokens", 2), ("64 others", 3)):
        found = compilations(lambda seed=seed: run(model, prompts(model, lengths, seed), 4))
        long = sum(seconds > 0.5 for seconds in found)
        print(f"{what}: {len(found)} programs, {long} of them over half a second to compile")


def first_token(model: kj.Model, length: int, repeats: int) -> None:
    """The time to one token behind a cached prefix, of the cache and of a session, against cold."""
    known, *questions = prompts(model, [length, *[20] * (repeats + 1)])
    cache = kj.PrefixCache(model, bytes=2**30)
    cold, warm, turn = [], [], []
    session = model.session()
    session.generate(known, max_new_tokens=1, stop_tokens=[], progress=False)
    for question in questions:
        cold.append(run(model, [known + question], 1))
        warm.append(run(model, [known + question], 1, prefix_cache=cache))
        session.tokens = list(known)
        begun = time.perf_counter()
        session.generate(question, max_new_tokens=1, stop_tokens=[], progress=False)
        turn.append(time.perf_counter() - begun)
    seconds = [statistics.median(times[1:]) for times in (cold, warm, turn)]
    print(f"\nfirst token of 20 more after {length} tokens")
    for what, took in zip(("cold", "cache", "session"), seconds, strict=True):
        print(f"  {what:8s} {1000 * took:8.1f} ms {seconds[0] / took:6.1f}x")
    print(f"  {cache.stats}")


def main() -> None:
    """Load a model and measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("path", nargs="?", default=SHIPPED, help="a checkpoint folder")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices, as one model axis")
    parser.add_argument("--length", type=int, default=32, help="tokens of a prompt (default 32)")
    parser.add_argument("--new", type=int, default=64, help="tokens of a reply (default 64)")
    parser.add_argument("--prefix", type=int, default=4000, help="tokens known (default 4000)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default 5)")
    options = parser.parse_args()
    if options.devices > 1:
        jax.config.update("jax_num_cpu_devices", options.devices)
    model = kj.load(options.path, kj.make_mesh(model=options.devices))
    compiled(model)
    throughput(model, options.length, options.new, options.repeats)
    first_token(model, options.prefix, options.repeats)


if __name__ == "__main__":
    main()
