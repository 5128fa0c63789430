"""The command line: what it prints, and the exit code and message of all that it refuses."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.reader import hf_shapes, random_tensors, save_hf
from kimi_jax.cli import main as cli
from kimi_jax.cli import measure as bench
from kimi_jax.text import tokenizer

SPECIAL = ("[BOS]", "[EOS]", "[PAD]")
RANKS = 260
CONFIG = dataclasses.replace(
    kj.Config.k3_1(),
    **{"hidden": 32, "layers": 3, "vocab": RANKS + 3, "mla_layers": (2,), "residual_block": 2},
    **{"max_positions": 64, "kda_heads": 2, "kda_key_dim": 8, "kda_value_dim": 8, "heads": 2},
    **{"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8},
    **{"dense_ffn": 32, "experts": 4, "active_experts": 2, "latent": 32, "expert_ffn": 32},
    **{"index_heads": 2, "index_dim": 8, "index_topk": 8},
    **{"bos": RANKS, "eos": (RANKS + 1,), "pad": RANKS + 2},
)
LAYER = "language_model.model.layers."
A_LOG = f"{LAYER}0.self_attn.A_log"
NORM = f"{LAYER}1.input_layernorm.weight"
SCALE = f"{LAYER}1.block_sparse_moe.experts.3.w2.weight_scale"


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(CONFIG, seed=1)


@pytest.fixture(scope="module")
def saved(tensors, tmp_path_factory):
    """A whole checkpoint with a tokenizer, not to be changed."""
    folder = tmp_path_factory.mktemp("cli") / "checkpoint"
    save_hf(folder, CONFIG.to_hf(), tensors, shard_bytes=40_000)
    ranks = tokenizer.train_ranks("the cat and the hat and the mat", RANKS)
    tokenizer.write_tokenizer(folder, ranks, {s: RANKS + i for i, s in enumerate(SPECIAL)})
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to plant faults in."""
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.fixture(scope="module")
def model(saved):
    return kj.load(saved)


@pytest.fixture
def loaded(model, saved, monkeypatch):
    """Every command of the test gets the one model, which compiles once."""
    monkeypatch.setattr(cli, "SHIPPED", saved)
    monkeypatch.setattr(kj, "load", lambda path, **options: model)


@pytest.fixture
def run(capsys):
    """Runs a command: its exit code, standard output, standard error."""

    def command(*words):
        code = cli.main([str(word) for word in words])
        return code, *capsys.readouterr()

    return command


def assert_refused(result, *parts):
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("kimi-jax: error: ") and "Traceback" not in err
    for part in parts:
        assert part in err


# Folders that cannot be used.


def test_missing_folder(run, tmp_path):
    assert_refused(run("generate", "a", "--model", tmp_path / "gone"), "gone", "no such folder")
    assert_refused(run("inspect", tmp_path / "gone"), "no such folder")


def test_file_for_a_folder(run, saved):
    file = saved / "config.json"
    for command in (("generate", "a", "--model"), ("inspect",)):
        assert_refused(run(*command, file), f"{file}: a file and not a folder")


def test_folder_without_config(run, folder):
    (folder / "config.json").unlink()
    assert_refused(run("generate", "a", "--model", folder), "copy", "no config.json")
    assert_refused(run("inspect", folder), "no config.json")


def test_config_that_is_no_json(run, folder):
    (folder / "config.json").write_text("{")
    assert_refused(run("inspect", folder), "config.json", "not a JSON file")


def test_config_without_a_key(run, folder):
    config = CONFIG.to_hf()
    del config["text_config"]["hidden_size"], config["text_config"]["q_lora_rank"]
    (folder / "config.json").write_text(json.dumps(config))
    for command in (("generate", "a", "--model"), ("inspect",)):
        assert_refused(run(*command, folder), "2 problems", "hidden_size", "q_lora_rank")


def test_missing_shard(run, folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    for command in (("generate", "a", "--model"), ("inspect",)):
        assert_refused(run(*command, folder), shard.name, "No such file")


def test_truncated_shard(run, folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    for command in (("generate", "a", "--model"), ("inspect",)):
        assert_refused(run(*command, folder), shard.name, "truncated")


def test_corrupt_header(run, folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[8:12] = b"????"
    shard.write_bytes(content)
    for command in (("generate", "a", "--model"), ("inspect",)):
        assert_refused(run(*command, folder), shard.name, "corrupt header")


def nan_like(array):
    return np.full_like(array, np.nan)


def tail(array):
    return np.concatenate([array[:-1], np.ones_like(array[-1:])])


def scale_255(array):
    return np.full_like(array, 255)


@pytest.mark.parametrize(
    "name, change, message",
    [
        (NORM, lambda a: None, f"missing, shape [{CONFIG.hidden}] is expected"),
        (NORM, lambda a: a[:-1], f"shape [{CONFIG.hidden - 1}], expected [{CONFIG.hidden}]"),
        (NORM, lambda a: a.astype(np.int8), "dtype I8, expected BF16"),
        (A_LOG, tail, "values other than zero after the 2 heads"),
        (SCALE, scale_255, "scale byte 255"),
        (NORM, nan_like, "NaN"),
    ],
)
def test_tensors_that_cannot_be_used(run, tensors, tmp_path, name, change, message):
    changed = {**tensors, name: change(tensors[name])}
    kept = {key: array for key, array in changed.items() if array is not None}
    save_hf(tmp_path / "changed", CONFIG.to_hf(), kept)
    assert_refused(run("generate", "1", "--tokens", "--model", tmp_path / "changed"), name, message)


def test_broken_tokenizer(run, folder):
    (folder / "tokenizer_config.json").unlink()
    assert_refused(run("generate", "a", "--model", folder), "tokenizer_config.json")


# Prompts and options that cannot be used.


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "no prompt"),
        (("",), "prompt 0 is empty"),
        (("a", ""), "prompt 1 is empty"),
        (("cat " * 40,), "the context of 64 leaves no room"),
        (("1,999", "--tokens"), "999 is no token id below the vocabulary of 263"),
        (("1,x", "--tokens"), "whole numbers"),
        (("", "--tokens"), "prompt 0 is empty"),
        (("a", "--max-new-tokens", 0), "max_new_tokens must be a positive whole number, got 0"),
        (("a", "--max-new-tokens", "x"), "--max-new-tokens: invalid int value: 'x'"),
        (("a", "--temperature", -1), "temperature must be a finite number >= 0, got -1.0"),
        (("a", "--temperature", "nan"), "temperature must be a finite number"),
        (("a", "--temperature", "inf"), "temperature must be a finite number"),
        (("a", "--temperature", "1e39"), "--temperature 1e+39 is more than a float32 holds"),
        (("-", "a", "-"), "- stands for standard input, which can be one prompt only"),
        (("a", "--top-p", 2), "top_p must lie in 0..1, got 2.0"),
        (("a", "--top-k", -1), "top_k must be a whole number >= 0"),
        (("a", "--min-p", 1.5), "min_p must lie in 0..1, got 1.5"),
        (("a", "--seed", -1), "seed must be a whole number"),
        (("a", "--stop", ""), "an empty stop string"),
        (("a", "--logprobs", 0), "--logprobs must be a positive number"),
        (("a", "--logprobs", 999), "logprobs must be"),
        (("a", "--dtype", "float8"), "--dtype: invalid choice: 'float8'"),
        (("a", "--devices", 0), "--devices: '0' is not a positive whole number"),
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


@pytest.mark.parametrize("words", [(), ("dance",)])
def test_no_command(run, words):
    assert_refused(run(*words), "kimi-jax --help")


def test_compile_of_no_config(run, tmp_path):
    assert_refused(run("bench", "--compile", "k4"), "neither k3, k3.1 nor the path")
    assert_refused(run("bench", "--compile", tmp_path), f"{tmp_path}: no checkpoint", "config.json")


def test_contexts_that_cannot_be_measured(run):
    words = ("bench", "--compile", "k3", "--context", "8,16")
    assert_refused(run(*words), "--compile takes one --context, got 8,16")
    result = run("bench", "--context", "128,100000")
    assert_refused(result, "--context 100000 needs", "that of --shape mini is 65536")
    assert_refused(run("bench", "--context", "--rows"), "--rows and --context: one at a time")


def test_compile_takes_no_option_of_a_measurement(run):
    words = ("bench", "--compile", "k3", "--steps", 16, "--shape", "mini")
    assert_refused(run(*words), "--compile runs nothing and takes no --shape, --steps")


@pytest.mark.parametrize("shape, context", [("shipped", 65536), ("mini", 64)])
def test_bench_of_more_than_the_context(run, monkeypatch, shape, context):
    monkeypatch.setattr(bench, "mini", lambda sparse: CONFIG)
    result = run("bench", "--prompt", 100_000, "--shape", shape)
    assert_refused(result, "--prompt 100000", f"that of --shape {shape} is {context}")


# What works.


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


def test_standard_input_is_a_prompt(run, loaded, monkeypatch):
    code, direct, _ = run("generate", "the cat\n", "--max-new-tokens", 2)
    monkeypatch.setattr("sys.stdin.read", lambda: "the cat\n\n", raising=False)
    assert code == 0 and run("generate", "-", "--max-new-tokens", 2)[1] == direct


def test_stop_text_ends_a_reply(run, loaded):
    _, out, _ = run("generate", "the cat", "--max-new-tokens", 8)
    reply = out.removeprefix("the cat")
    stop = reply[2:4]
    _, stopped, _ = run("generate", "the cat", "--max-new-tokens", 8, "--stop", stop)
    assert stopped == f"the cat{reply[: reply.index(stop)]}\n"


def test_nan_logits_are_an_error_of_their_own(run, loaded, model, monkeypatch):
    broken = {
        path: w * float("nan") if path[-1] == "head" else w for path, w in model.weights.items()
    }
    monkeypatch.setattr(kj, "load", lambda *a, **k: dataclasses.replace(model, weights=broken))
    for words in ((), ("--json",)):
        code, _, err = run("generate", "the cat", *words)
        assert code == 1 and ("NaN" in err or words)


def test_ctrl_c(run, loaded, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_compile", interrupted)
    assert run("generate", "the cat") == (130, "the cat", "\n")


@pytest.mark.parametrize("words", [("inspect",), ("inspect", "--all"), ("--help",)])
def test_a_closed_pipe_is_no_error(saved, monkeypatch, capsys, words):
    monkeypatch.setattr(cli, "SHIPPED", saved)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", closed)
        code = cli.main(words)
    assert code == 0 and capsys.readouterr().err == ""


def test_unforeseen_errors_keep_their_traceback(run, loaded, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_compile", broken)
    with pytest.raises(ZeroDivisionError):
        run("generate", "the cat")


def test_inspect_groups_tensors_and_totals_them(run, saved, tensors):
    code, out, err = run("inspect", saved)
    assert (code, err) == (0, "")
    nbytes = sum(array.nbytes for array in tensors.values())
    assert f"{len(tensors):,} tensors, {nbytes:,} bytes" in out
    for part in ("K K M", "d e e", "MXFP4", "263 ids of which 3 special", "8 keys by 2 heads"):
        assert part in out
    packed = re.search(r"experts\.\*\.w1\.weight_packed +(\d+) +(\S+ x \S+) +U8", out)
    assert packed and packed.groups() == ("8", "32 x 16")
    shards = len(list(saved.glob("*.safetensors")))
    assert f"shards: {shards}" in out


def test_inspect_counts_parameters(run, saved):
    plain = hf_shapes(CONFIG, packed=False)
    count = sum(int(np.prod(shape)) for shape, _ in plain.values())
    padding = sum(shape[0] - CONFIG.kda_heads for n, (shape, _) in plain.items() if "A_log" in n)
    assert f"{count - padding:,} parameters" in run("inspect", saved)[1]


def test_inspect_lists_every_tensor(run, saved, tensors):
    code, out, _ = run("inspect", saved, "--all")
    assert code == 0 and {line.split()[0] for line in out.splitlines()} == set(tensors)


def test_inspect_of_a_broken_value_does_not_read_it(run, tensors, tmp_path):
    changed = {**tensors, NORM: nan_like(tensors[NORM])}
    save_hf(tmp_path / "changed", CONFIG.to_hf(), changed)
    code, out, _ = run("inspect", tmp_path / "changed")
    assert code == 0 and "none, prompts must be token ids" in out


def test_bench_measures_random_weights(run, monkeypatch):
    monkeypatch.setattr(bench, "mini", lambda sparse: CONFIG)
    code, out, _ = run("bench", "--prompt", 8, "--batch", 1, "--steps", 2, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["step"] for row in rows] == ["prefill", "decode"]
    assert all(row["tokens_per_s"] > 0 and row["compile_s"] >= 0 for row in rows)


def test_bench_measures_the_ends_of_contexts(run, monkeypatch):
    """8 tokens attend to all keys, 40 to 8 of them: selection takes time there alone."""
    monkeypatch.setattr(bench, "mini", lambda sparse: CONFIG)
    monkeypatch.setattr(bench, "REPEATS", 1)
    place = [f"--place={one}" for one in ("keys=helix", "helix_block=4", "pad=vocab")]
    code, out, _ = run(
        "bench", "--context", "8,40", "--chunk", 8, "--mesh", "1x2", *place, "--json"
    )
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    steps = [(row["step"], row["context"], row["tokens"]) for row in rows]
    assert steps == [("prefill", 8, 8), ("prefill", 40, 8), ("decode", 8, 1), ("decode", 40, 1)]
    assert [row["selection_ms"] > 0 for row in rows] == [False, True] * 2
    for row in rows:
        assert row["ms_per_token"] == pytest.approx(row["selection_ms"] + row["rest_ms"])
    assert rows[0]["rest_by_first"] == rows[2]["rest_by_first"] == 1


def test_a_profile_names_the_parts_and_says_how_it_is_opened(run, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "mini", lambda sparse: CONFIG)
    code, out, _ = run("bench", "--profile", tmp_path / "new", "--prompt", 8, "--steps", 2)
    assert code == 0 and f"tensorboard --logdir {tmp_path / 'new'}" in out
    (trace,) = (tmp_path / "new").rglob("*.trace.json.gz")
    assert f"open {trace} at https://ui.perfetto.dev" in out
    (recorded,) = (tmp_path / "new").rglob("*.xplane.pb")
    names = recorded.read_bytes()
    for part in (b"embedding", b"layer_0/attention/kda", b"layer_2/attention/mla", b"sample"):
        assert part in names


def test_a_profile_that_cannot_be_written_is_refused_before_anything_is_built(
    run, monkeypatch, tmp_path
):
    monkeypatch.setattr(bench, "random_model", lambda *_: pytest.fail("built"))
    (tmp_path / "file").touch()
    for name, message in (("file", "a file and not a folder"), ("file/new", "Not a directory")):
        result = run("bench", "--profile", tmp_path / name)
        assert_refused(result, f"--profile {tmp_path / name}: {message}")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert_refused(run("bench", "--profile", tmp_path), "no permission to write there")


def test_bench_compiles_a_step_from_shapes(run, saved):
    code, out, _ = run("bench", "--compile", saved, "--dtype", "float32")
    assert code == 0 and "argument bytes" in out and "a step of" in out


@pytest.mark.parametrize("sparse", [False, True])
def test_the_shape_for_measuring_is_a_valid_config(sparse):
    config = bench.mini(sparse)
    assert kj.Config.from_hf(config.to_hf()) == config
    assert (config.layers, config.sparse, config.index_topk) == (9, sparse, 256 if sparse else 0)


def subprocess_run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


COUNT = (
    "from kimi_jax.cli.main import main; code = main({}); "
    "import jax; print(code, jax.device_count())"
)


def test_devices(saved):
    """JAX has as many devices as the command asks for, whatever other flags are set."""
    words = ["inspect", str(saved), "--all", "--devices", "3"]
    done = subprocess_run(COUNT.format(words), XLA_FLAGS="--xla_cpu_enable_fast_math=false")
    assert done.stdout.splitlines()[-1] == "0 3", done.stderr


def test_devices_of_the_environment_stand(saved):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    words = ["inspect", str(saved), "--all"]
    assert subprocess_run(COUNT.format(words), **flags).stdout.splitlines()[-1] == "0 2"


def test_devices_that_contradict_the_environment(run, saved, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert_refused(run("inspect", saved, "--devices", 4), "--devices 4", "asks for 2")


def test_devices_after_jax_has_started(run, saved, model, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert_refused(run("inspect", saved, "--devices", 5), "too late")


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "bench"])
def test_help_teaches_by_example(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert (
        ended.value.code == 0 and f"examples:\n  kimi-jax {command}" in out and "--devices" in out
    )


def test_help_says_what_an_option_does(capsys):
    for command, says in {
        "generate": ("less than P times as probable as the best one", "start of the random draws"),
        "bench": ("number type of the computation", "with --compile bfloat16"),
    }.items():
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        out = " ".join(capsys.readouterr().out.split())
        assert all(part in out for part in says)


def test_module_runs_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "kimi_jax", "--help"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0
    commands = {"generate", "chat", "inspect", "bench"}
    assert set(re.findall(r"^    ?(\w+) ", done.stdout, re.M)) >= commands
    assert "convert" not in done.stdout.split()


def test_text_of_several_prompts_ends_before_a_stop_string(capsys):
    """The tokens hold what the stop string was found in; the text that is printed does not."""
    usage = kj.Usage(1, 3, 0.0, 0.0)
    completion = kj.Completion([5, 6, 7], ", and th", "stop", None, usage)
    model = type("Model", (), {"tokenizer": object()})()
    cli._print_completion(model, "The Queen", completion, as_json=False)
    assert capsys.readouterr().out == "The Queen, and th\n\n"


# Meshes and plans


def test_a_mesh_and_a_placement_of_the_command_line_write_the_same_text(capsys):
    words = ["generate", "The Queen", "--max-new-tokens", "4", "--json"]
    assert cli.main([*words, "--mesh", "1x1"]) == 0
    one = json.loads(capsys.readouterr().out)
    place = ["--place", "experts=auto", "--place", "local_below=2", "--place", "latent=sharded"]
    assert cli.main([*words, "--mesh", "2x4", *place]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == one["tokens"]


BAD_MESHES = [
    (["--mesh", "8"], "'8' is not of the form 2x4"),
    (["--mesh", "4x4"], "needs 16 devices, JAX has 8"),
    (["--mesh", "1x3"], "heads: 8 over 3 ranks"),
    (["--place", "expert=local"], "--place expert=...: no such option, there are rows"),
    (["--place", "experts"], "'experts' is not of the form NAME=VALUE"),
    (["--place", "pad=vocab", "--place", "pad=heads"], "--place pad=... is given twice"),
    (
        ["--coordinator", "here", "--processes", "2", "--process-id", "0"],
        "--coordinator takes HOST:PORT, got 'here'",
    ),
    (["--place", "local_below=few"], "--place local_below takes a whole number, got 'few'"),
    (["--processes", "2"], "--coordinator, --processes and --process-id belong together"),
    (
        ["--coordinator", "h:1", "--processes", "2", "--process-id", "2"],
        "--process-id 2 is not among the 2 processes, 0 to 1",
    ),
]


@pytest.mark.parametrize("options, message", BAD_MESHES, ids=str)
def test_a_bad_mesh_or_placement_is_refused(capsys, options, message):
    assert cli.main(["generate", "The Queen", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_is_printed_with_what_fits(capsys):
    options = ["--model", "8", "--context", "131072", "--batch", "64", "--hbm", "141,600"]
    assert cli.main(["plan", "k3.1", *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"routed experts +180\.807", out)
    assert "141 GB a device: does not fit" in out and "600 GB a device: fits" in out
    assert cli.main(["plan", "k3.1", *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] == {"141": False, "600": True}
    assert sum(said["terms"].values()) == said["bytes"]["all"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["k3", "--model", "7"], "vocabulary: 163840 over 7 ranks"),
        (["k3", "--hbm", "much"], "'much' are no sizes in GB"),
        (["k3", "--context", "2000000"], "--context 2000000 is over the model's 1048576 tokens"),
        (["nothing"], "'nothing' is neither k3, k3.1 nor the path of a config"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_is_refused(capsys, options, message):
    assert cli.main(["plan", *options]) == 2
    assert message in capsys.readouterr().err


def test_experts_are_measured_and_the_crossover_is_said(capsys, monkeypatch):
    monkeypatch.setattr(bench, "STEP_ROWS", (1, 2))
    monkeypatch.setattr(bench, "REPEATS", 1)
    assert cli.main(["bench", "--experts", "--shape", "shipped", "--mesh", "1x2"]) == 0
    out = capsys.readouterr().out
    assert "exchange ms" in out and re.search(r'Placement\(experts="auto", local_below=\d+\)', out)


def test_sliced_rows_are_measured_and_the_crossover_is_said(capsys, monkeypatch):
    monkeypatch.setattr(bench, "STEP_ROWS", (1, 2))
    monkeypatch.setattr(bench, "REPEATS", 1)
    assert cli.main(["bench", "--rows", "--shape", "shipped", "--mesh", "1x2"]) == 0
    out = capsys.readouterr().out
    assert "sliced by full" in out and re.search(r'Placement\(rows="(full|sliced)"', out)
    assert cli.main(["bench", "--rows", "--mesh", "2x1"]) == 2
    assert "over several model ranks" in capsys.readouterr().err


def test_the_crossover_takes_two_wins_by_two_per_cent():
    rows = [(1, 2, 1, 2.0), (2, 1, 1, 0.97), (4, 1, 1, 1.01), (8, 1, 1, 0.9), (16, 1, 1, 0.9)]
    assert bench.local_below(rows) == 8
    assert bench.local_below(rows[:3]) == 5
    assert bench.local_below(rows[3:]) == 0
    found = [bench.crossover(some) for some in (rows, rows[:3], rows[3:])]
    assert found == [8, None, 0]
