"""`kimi-jax generate`: what it prints, and the prompts and options that it refuses."""

import argparse
import dataclasses
import io
import json
import re

import pytest
from commands import assert_refused

import kimi_jax as kj
from kimi_jax.cli import generate
from kimi_jax.cli.records import Record

# Prompts and options that cannot be used.


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "no prompt"),
        (("",), "prompt 0 is empty"),
        (("a", ""), "prompt 1 is empty"),
        (("cat " * 40,), "the context of 64 leaves no room"),
        (("1,999", "--tokens"), "999 is not a token id below the vocabulary of 263"),
        (("1,x", "--tokens"), "whole numbers with commas between them, got '1,x'"),
        (("1,２", "--tokens"), "whole numbers with commas between them, got '1,２'"),
        (("", "--tokens"), "prompt 0 is empty"),
        (
            ("a", "--max-new-tokens", 0),
            "--max-new-tokens: '0' is not a whole number from 1 to 2147483647",
        ),
        (("a", "--max-new-tokens", "x"), "--max-new-tokens: 'x' is not a whole number"),
        (("a", "--temperature", -1), "temperature must be a finite number >= 0, got -1.0"),
        (("a", "--temperature", "nan"), "temperature must be a finite number"),
        (("a", "--temperature", "inf"), "temperature must be a finite number"),
        (("a", "--temperature", "1e39"), "--temperature 1e+39 is more than a float32 holds"),
        (("-", "a", "-"), "- stands for standard input, which can be one prompt only"),
        (("a", "--drafts", 2), "--drafts is for a drafter: name one with --draft"),
        (("a", "--draft", "ngrams"), "ngrams: "),
        (("a", "--top-p", 2), "top_p must lie in 0..1, got 2.0"),
        (("a", "--top-k", -1), "--top-k: '-1' is not a whole number from 0"),
        (("a", "--min-p", 1.5), "min_p must lie in 0..1, got 1.5"),
        (("a", "--seed", -1), "--seed: '-1' is not a whole number from 0"),
        (("a", "--stop", ""), "an empty stop string"),
        (("a", "--logprobs", 0), "--logprobs: '0' is not a whole number from 1"),
        (("a", "--logprobs", 999), "logprobs must be"),
        (("a", "--dtype", "float8"), "--dtype: no such choice 'float8'"),
        (("a", "--devices", 0), "--devices: '0' is not a whole number from 1 to 1024"),
        (("a", "--temprature", 1), "unrecognized arguments"),
    ],
)
def test_prompts_and_options_that_cannot_be_used(run, loaded, words, message):
    assert_refused(run("generate", *words), message)


def test_text_needs_a_tokenizer_and_ids_do_not(run, folder):
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (folder / name).unlink()
    assert_refused(run("generate", "text", "--model", folder), "this folder has no tokenizer")
    words = ("--tokens", "--max-new-tokens", 2, "--model", folder)
    code, out, _ = run("generate", "7,300", *words)
    assert (code, out) == (2, "")
    code, out, err = run("generate", "7,12", *words)
    assert code == 0 and re.fullmatch(r"7,12(,\d+){0,2}\n", out) and "new tokens" in err
    code, out, _ = run("generate", "7,12", "--json", *words)
    assert code == 0 and json.loads(out)["text"] is None


def test_a_prompt_is_shown_and_continued(run, loaded, model):
    code, out, err = run("generate", "the cat", "--max-new-tokens", 5)
    (expected,) = model.generate("the cat", max_new_tokens=5)
    assert code == 0 and out == f"the cat{expected.text}\n"
    counts = f"{expected.usage.prompt_tokens} prompt tokens.* {len(expected.tokens)} new tokens"
    assert len(err.splitlines()) == 1 and re.search(counts, err)


def test_json_has_a_line_for_each_prompt(run, loaded, model):
    sampled = ("--temperature", 0.9, "--top-k", 50, "--top-p", 0.9, "--min-p", 0.01, "--seed", 4)
    code, out, err = run("generate", "the cat", "a", "--json", "--max-new-tokens", 4, *sampled)
    lines = [json.loads(line) for line in out.splitlines()]
    sampling = kj.Sample(0.9, 50, 0.9, 0.01)
    wanted = model.generate(["the cat", "a"], max_new_tokens=4, sampling=sampling, seed=4)
    assert (code, err) == (0, "")
    assert [line["prompt"] for line in lines] == ["the cat", "a"]
    assert [line["tokens"] for line in lines] == [one.tokens for one in wanted]
    assert [line["text"] for line in lines] == [one.text for one in wanted]
    assert [line["finish_reason"] for line in lines] == [one.finish_reason for one in wanted]


def test_logprobs(run, loaded):
    words = ("generate", "the cat", "--max-new-tokens", 3, "--logprobs", 2)
    _, out, _ = run(*words, "--json")
    line = json.loads(out)
    assert len(line["logprobs"]) == len(line["tokens"])
    assert all(len(one["top"]) == 2 for one in line["logprobs"])
    code, out, _ = run(*words)
    assert code == 0 and "log-probabilities" in out
    assert all(f"{one['logprob']:.3f}" in out for one in line["logprobs"])


def test_several_prompts_are_printed_whole(run, loaded):
    code, out, _ = run("generate", "the cat", "a", "--max-new-tokens", 2)
    assert code == 0 and out.startswith("the cat") and "\n\na" in out


def test_a_file_of_prompts_is_done_once(run, loaded, model, tmp_path):
    """Its completions are those of the prompts alone, and a second run adds what is missing."""
    prompts, replies = tmp_path / "prompts.jsonl", tmp_path / "replies.jsonl"
    lines = ["the cat", {"id": "b", "prompt": [97], "max_new_tokens": 2, "seed": 4}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("generate", "--input", prompts, "--output", replies, "--max-new-tokens", 4)
    code, out, err = run(*words)
    assert (code, out) == (0, "") and "2 prompts of" in err and "tok/s" in err
    first = replies.read_text()
    done = {line["id"]: line for line in map(json.loads, first.splitlines())}
    (expected,) = model.generate("the cat", max_new_tokens=4)
    assert done[1]["tokens"] == expected.tokens and done[1]["text"] == expected.text
    assert done["b"]["prompt"] == [97] and len(done["b"]["tokens"]) <= 2

    replies.write_text(first + '{"id": 3, "pro')  # as a stopped command would leave it
    with prompts.open("a") as file:
        file.write('"a"\n')
    code, _, err = run(*words)
    assert code == 0 and "2 of 3 prompts are skipped" in err and "1 prompts of" in err
    assert replies.read_text().startswith(first) and replies.read_text().count("\n") == 3
    assert json.loads(replies.read_text().splitlines()[2])["id"] == 3
    code, _, err = run(*words)
    assert code == 0 and "nothing to do" in err


def test_prompts_that_cannot_run_leave_the_output_as_it_was(run, loaded, tmp_path):
    replies = tmp_path / "replies.jsonl"
    words = ("generate", "5,99999", "--tokens", "--output", replies)
    assert_refused(run(*words), "99999 is not a token id")
    assert not replies.exists()


def test_what_is_done_stays_when_a_run_is_stopped(run, loaded, model, tmp_path, monkeypatch):
    """Ctrl-C after the first of three."""
    replies = tmp_path / "replies.jsonl"
    words = ("generate", "the cat", "a", "b", "--output", replies, "--max-new-tokens", 2)

    class Stopped:
        tokenizer = model.tokenizer

        def generate(self, prompts, *, on_completion, **options):
            (completion,) = model.generate(prompts[:1], max_new_tokens=2)
            on_completion(0, completion)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kj, "load", lambda *a, **k: Stopped())
        code, _, err = run(*words)
    assert code == 130 and "1 of 3 done; the same command goes on" in err
    code, _, err = run(*words)
    lines = [json.loads(line) for line in replies.read_text().splitlines()]
    assert code == 0 and "1 of 3 prompts are skipped" in err
    assert [line["prompt"] for line in lines] == ["the cat", "a", "b"]


def test_standard_input_is_a_prompt(run, loaded, monkeypatch):
    code, direct, _ = run("generate", "the cat\n", "--max-new-tokens", 2)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the cat\n\n")))
    assert code == 0 and run("generate", "-", "--max-new-tokens", 2)[1] == direct


def test_stop_text_ends_a_reply(run, loaded):
    _, out, _ = run("generate", "the cat", "--max-new-tokens", 8)
    reply = out.removeprefix("the cat")
    stop = reply[2:4]
    _, stopped, _ = run("generate", "the cat", "--max-new-tokens", 8, "--stop", stop)
    assert stopped == f"the cat{reply[: reply.index(stop)]}\n"


def test_nan_logits_are_an_error_of_their_own(run, loaded, model, monkeypatch):
    broken = {
        path: w * float("nan") if path[-1] == "head" else w for path, w in model.params.items()
    }
    monkeypatch.setattr(kj, "load", lambda *a, **k: dataclasses.replace(model, params=broken))
    code, out, err = run("generate", "the cat")
    assert (
        code == 1
        and err == "kimi-jax: error: the logits hold NaN, or nothing finite that may be chosen\n"
    )
    code, out, err = run("generate", "the cat", "a", "--json", "--logprobs", 2)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert code == 1 and [line["prompt"] for line in lines] == ["the cat", "a"]
    for line in lines:
        assert line["finish_reason"] == "error" and line["tokens"] == [] and not line["logprobs"]
        assert line["error"].startswith("the logits hold NaN")


def test_text_of_several_prompts_ends_before_a_stop_string(capsys):
    """The tokens hold what the stop string was found in; the text that is printed does not."""
    usage = kj.Usage(1, 3, 0.0, 0.0)
    completion = kj.Completion([5, 6, 7], ", and th", "stop", None, usage)
    model = type("Model", (), {"tokenizer": object()})()
    options = argparse.Namespace(json=False, input=None)
    generate._print_completion(model, Record(0, "The Queen"), completion, options)
    assert capsys.readouterr().out == "The Queen, and th\n\n"
