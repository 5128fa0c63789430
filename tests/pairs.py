"""Two processes of one run: started together, with an address to meet at and a compilation cache
that keeps every program.
"""

import os
import random
import socket
import subprocess

import jax
from conftest import ROOT

# Below the ports that Linux gives to whoever asks for any (from 32768 on): none of these is given
# away between the moment that it is found free and the one that it is listened at.
PORTS = range(15_000, 32_000)


def free_address():
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return f"127.0.0.1:{port}"


def start_pair(command):
    """Both processes, with pipes for what they say; `command(address, me)` gives the words of
    process `me`.
    """
    address = free_address()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return [
        subprocess.Popen(command(address, me), cwd=ROOT, env=environment, **pipes)
        for me in range(2)
    ]


def results_of(pair, timeout=500):
    """(exit code, output, errors) of each process; both are ended where one takes too long."""
    try:
        said = [process.communicate(timeout=timeout) for process in pair]
    finally:
        for process in pair:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(pair, said, strict=True)]
