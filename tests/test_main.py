"""The command line."""

from pathlib import Path

import numpy as np
import pytest

from mkdsl.__main__ import main
from models.decode import teacher_forced
from models.gguf import is_installed
from models.weights import load

FIXTURES = Path(__file__).parent / "fixtures"
MODEL = str(FIXTURES / "llama_rope3_tied")


def run(*args: object) -> int:
    return main([str(a) for a in args])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_a_batch(tmp_path: Path, dtype: str) -> None:
    ids = np.array([[3, 4, 5, 6], [7, 8, -1, -1]], np.int32)
    np.save(tmp_path / "ids.npy", ids)
    out = tmp_path / "out.bin"
    args = ["--ids", tmp_path / "ids.npy", "--out", out, "--dtype", dtype]
    assert run("logits", "--model", MODEL, *args, "--implementation", "xla") == 0
    found = np.load(out)
    assert found.dtype == np.float32
    config, params = load(MODEL, dtype)
    want = teacher_forced(config, params, ids, implementation="xla")
    np.testing.assert_array_equal(found, want)


@pytest.mark.slow
def test_logits_of_one_row_in_the_simulator(tmp_path: Path) -> None:
    oracle = np.load(FIXTURES / "llama_rope3_tied" / "oracle.npz")
    np.save(tmp_path / "ids.npy", oracle["prompt_ids"].astype(np.int64))
    args = ["--ids", tmp_path / "ids.npy", "--out", tmp_path / "out.npy"]
    args += ["--implementation", "simulate", "--dtype", "float32"]
    assert run("logits", "--model", MODEL, *args) == 0
    found, want = np.load(tmp_path / "out.npy"), oracle["logits_f32"]
    np.testing.assert_allclose(found, want[: len(found)], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (np.array([3, 512]), "[512]: tokens are 0 to 511"),
        (np.array([[3, -1, 4]]), "padding (-1) stands on the right"),
        (np.array([[3], [-1]]), "padding (-1) stands on the right"),
        (np.array([1.0]), "holds no array of integers"),
        (np.array([], np.int32), "[0] is neither [T] nor [B, T]"),
        (np.zeros((1, 1, 1), np.int32), "[1, 1, 1] is neither [T] nor [B, T]"),
    ],
)
def test_bad_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ids: np.ndarray, words: str
) -> None:
    np.save(tmp_path / "ids.npy", ids)
    out = tmp_path / "out.npy"
    args = ["--model", MODEL, "--ids", tmp_path / "ids.npy", "--out", out]
    assert run("logits", *args) == 2
    assert words in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["logits", "--model", "none"], "--model: none is no folder"),
        (["logits", "--model", FIXTURES], "config.json does not exist"),
        (["logits", "--model", MODEL, "--ids", "none.npy"], "cannot be read"),
        (["show", "--model", "none"], "no shape: llama-3.2-1b"),
        (
            ["generate", "--model", MODEL, "--prompt", "x"],
            "tokenizer.json does not exist",
        ),
    ],
)
def test_errors_have_no_traceback(
    capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    if args[0] == "logits" and "--ids" not in args:
        args = [*args, "--ids", "ids.npy"]
    if args[0] == "logits":
        args = [*args, "--out", "out.npy"]
    assert run(*args) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert words in err


def test_an_implementation_that_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--prompt", "x", "--implementation", "mosaic_gpu"]
    assert run("generate", "--model", MODEL, *args) == 2
    assert "hint: install jax[cuda13]" in capsys.readouterr().err


def test_an_error_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mkdsl.cli.show.run", lambda args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("show", "--model", MODEL)


@pytest.mark.parametrize("stage", ["program", "schedule"])
@pytest.mark.parametrize("machine", ["h200", "rtx4090", "simulated"])
def test_show(capsys: pytest.CaptureFixture[str], stage: str, machine: str) -> None:
    args = ["--stage", stage, "--machine", machine, "--batch", "2"]
    assert run("show", "--model", MODEL, *args) == 0
    text = capsys.readouterr().out
    assert text.startswith("program llama_decode(" if stage == "program" else stage)
    assert "\nbuffer params.embed: bf16[512, 128] input" in text


@pytest.mark.parametrize(
    "command", ["demo", "generate", "logits", "show", "estimate", "timeline"]
)
def test_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as end:
        run(command, "--help")
    assert end.value.code == 0
    assert "--model" in capsys.readouterr().out or command == "demo"


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="the demo's packages are not installed")
def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--max-tokens", 8, "--dtype", "float32") == 0
    text = capsys.readouterr().out
    assert "The capital of France is the capital of the country" in text
    assert "8 tokens, " in text
    assert "xla: it needs a CUDA device" in text
    assert "pages: " in text
