"""The names of implementations: those of the tables, and no others."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MESHED

import kimi_jax as kj
from kimi_jax.config.block_sizes import BLOCK_SIZES, block_sizes
from kimi_jax.model.implementations import DEFINITIONS, TABLES, TRAINING, Implementations, fast_on
from kimi_jax.runtime.program import make_program

WRONG = st.one_of(st.text(max_size=8), st.sampled_from(["Chunked", "grouped ", "auto"]))


def test_every_name_of_a_table_is_a_choice():
    fields = {field.name for field in dataclasses.fields(Implementations)}
    assert fields == {*TABLES, "blocks", "chunk"}
    for names in itertools.product(*TABLES.values()):
        chosen = Implementations(**dict(zip(TABLES, names, strict=True)))
        assert all(callable(table[getattr(chosen, name)]) for name, table in TABLES.items())


def test_definitions_and_training_are_what_they_say():
    assert (DEFINITIONS.kda, DEFINITIONS.mla, DEFINITIONS.moe) == ("recurrent", "expanded", "dense")
    assert (TRAINING.mla, TRAINING.moe, TRAINING.select) == ("expanded", "dense", "teach")
    assert hash(Implementations()) == hash(Implementations()) != hash(DEFINITIONS)


@given(st.dictionaries(st.sampled_from(sorted(TABLES)), WRONG, min_size=1))
@settings(max_examples=60)
def test_unknown_names_raise_one_error_that_lists_what_exists(wrong):
    wrong = {name: value for name, value in wrong.items() if value not in tuple(TABLES[name])}
    if not wrong:
        return
    with pytest.raises(ValueError) as error:
        Implementations(**wrong)
    lines = str(error.value)
    for name, value in wrong.items():
        assert f"{name} must be one of {', '.join(TABLES[name])}, got {value!r}" in lines


def test_a_program_takes_the_block_sizes_of_its_meshs_platform():
    """A mesh's, not the default backend's: the compiler script has GPUs on a host without one."""
    assert make_program(MESHED).implementations.blocks == BLOCK_SIZES["cpu"]
    assert block_sizes("gpu") == block_sizes("cuda") == BLOCK_SIZES["gpu"]
    chosen = Implementations(blocks=BLOCK_SIZES["gpu"])
    assert make_program(MESHED, implementations=chosen).implementations == chosen


def test_gpus_run_what_has_no_loop_of_unknown_length():
    assert fast_on("cpu") == Implementations()
    assert fast_on("gpu") == fast_on("cuda")
    assert (fast_on("gpu").kda, fast_on("gpu").mla) == ("transitions", "static")


def test_block_sizes_are_positive_whole_numbers():
    with pytest.raises(ValueError) as error:
        dataclasses.replace(BLOCK_SIZES["cpu"], keys=0, dense_bytes=-3)
    assert str(error.value).splitlines() == [
        "keys must be a positive whole number, got 0",
        "dense_bytes must be a positive whole number, got -3",
    ]


@pytest.mark.parametrize("chunk", [0, -1, True])
def test_a_chunk_is_a_positive_whole_number(chunk):
    with pytest.raises(ValueError, match="chunk must be a positive whole number, got"):
        Implementations(chunk=chunk)


def test_the_definition_of_attention_refuses_sharded_keys():
    place = kj.Placement(keys="helix")
    with pytest.raises(NotImplementedError, match="mla='expanded', the definition, runs on"):
        make_program(MESHED, kj.make_mesh(model=4), place, implementations=DEFINITIONS)
