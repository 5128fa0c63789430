"""Prompts from a file, and completions to another: what is read, refused and resumed."""

import dataclasses
import json

import pytest

import kimi_jax as kj
from kimi_jax.cli.records import Output, PromptFileError, Record, parse_records, per_prompt
from kimi_jax.errors import FileError

COMPLETION = kj.Completion([5], "é", "length", None, kj.Usage(1, 1, 0.0, 0.0))


def test_a_line_is_text_ids_or_an_object():
    lines = b'"a"\n\n[1, 2]\n{"id": "x", "prompt": "c", "seed": 3, "logit_bias": {"5": -1}}'
    assert parse_records(lines) == [
        Record(1, "a"),
        Record(3, [1, 2]),
        Record("x", "c", {"seed": 3, "logit_bias": {5: -1}}),
    ]


@pytest.mark.parametrize(
    "line, message",
    [
        ("", "it holds no prompt"),
        ("5", "prompt must be text or a list of token ids, got 5"),
        ("[1, true]", "prompt must be text"),
        ("[]", "prompt must be text"),
        ('""', "prompt must be text"),
        ('"a', "line 1: "),
        ('{"prompt": "a", "prompt": "b"}', "appears twice"),
        ('{"prmpt": "a"}', "no such key 'prmpt', known are prompt"),
        ('{"prompt": "a", "max_tokens": 1}', "no such key 'max_tokens'"),
        ('{"prompt": "a", "id": [1]}', "id must be text or a whole number"),
        ('{"prompt": "a", "id": true}', "id must be text or a whole number"),
        (r'"\ud800"', "half a surrogate pair"),
        ('"a"\n{"prompt": "b", "id": 1}', "line 2: the id 1 is given twice"),
    ],
)
def test_what_cannot_be_a_prompt_is_refused_by_its_line(line, message):
    with pytest.raises(PromptFileError, match=message.replace("[", r"\[")):
        parse_records(line.encode())
    with pytest.raises(PromptFileError) as refused:
        parse_records(b"1\n2\n" + b"\xff\n")
    assert len(refused.value.problems) == 3


def test_options_of_a_prompt_stand_beside_those_of_all():
    records = [Record(1, "a"), Record(2, "b", {"seed": 3, "stop": "x"})]
    assert per_prompt({"seed": 1, "top_k": 5, "stop": ["y"]}, records) == {
        **{"seed": [1, 3], "top_k": 5, "stop": [["y"], ["x"]]}
    }
    assert per_prompt({"top_k": 5}, records[:1]) == {"top_k": 5}


def test_a_file_goes_on_after_its_last_whole_line(tmp_path):
    path, records = tmp_path / "replies.jsonl", [Record(1, "a"), Record("ü", [2])]
    output = Output(path)
    output.open()
    assert output.missing(records) == records
    output.write(records[0], COMPLETION)
    whole = path.read_bytes()
    assert whole.count(b"\n") == 1 and json.loads(whole)["text"] == "é"
    assert json.loads(whole) == {"id": 1, "prompt": "a", **json.loads(
        json.dumps(dataclasses.asdict(COMPLETION))
    )}  # fmt: skip
    for length in range(len(whole)):  # of a second line that was cut off
        path.write_bytes(whole + whole[:length])
        again = Output(path)
        assert path.read_bytes() == whole + whole[:length]  # till it is known that all can run
        again.open()
        assert again.missing(records) == records[1:] and path.read_bytes() == whole
    again.write(records[1], COMPLETION)
    assert Output(path).missing(records) == [] and path.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    "content", ["hello", "a letter\n", '{"id": 1}\n', '{"prompt": "a"}', "[1]\n", '"a"\n']
)
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "letter.txt"
    path.write_text(content)
    with pytest.raises(FileError, match="left as it is"):
        Output(path)
    assert path.read_text() == content


def test_an_id_stands_for_one_prompt(tmp_path):
    output = Output(tmp_path / "replies.jsonl")
    output.open()
    output.write(Record(1, "a"), COMPLETION)
    with pytest.raises(FileError, match="another prompt with the id 1"):
        Output(tmp_path / "replies.jsonl").missing([Record(1, "b")])
