"""The commands that show: estimate, timeline, show --picture."""

import json
from pathlib import Path

import numpy as np
import pytest

from mkdsl.__main__ import main
from mkdsl.lower.boundaries import LAUNCH_NS
from mkdsl.lower.machine import simulated
from mkdsl.lower.stamps import STAMPS
from mkdsl.runtime.virtual_time import simulate_stamps
from models.decode import DecodeStep, argument_shapes
from models.registry import read_config

MODEL = str(Path(__file__).parents[1] / "fixtures" / "llama_rope3_tied")
STEP = ("--model", MODEL, "--machine", "simulated", "--max-length", "256")
Out = pytest.CaptureFixture[str]


def run(*args: object) -> int:
    return main([str(a) for a in args])


# ------------------------------------------------------------------------- estimate


def test_the_estimate_as_text(capsys: Out) -> None:
    assert run("estimate", *STEP, "--context", 128) == 0
    text = capsys.readouterr().out
    assert "batch 1, context 128, simulated4 (4 SMs, 0.14 TB/s, 30 TFLOP/s)" in text
    head, *rows = text.split("Tasks, while")[0].splitlines()[3:]
    assert head.split() == [
        *("stage", "times", "blocks", "last", "wave"),
        *("launch", "waves", "bubble", "trips", "sum"),
    ]
    (down,) = (row for row in rows if row.split()[:1] == ["down"])
    assert down.split()[1] == "3"
    assert "bound by" in text
    assert "potential gain: " in text
    assert "as one kernel: " in text


def test_the_estimate_as_json(capsys: Out) -> None:
    assert run("estimate", *STEP, "--context", 128, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    total = sum(b["total_ns"] for b in found["boundaries"])
    assert found["boundary_ns"] == pytest.approx(total)
    assert found["gain"] == pytest.approx(total / (total + found["work_ns"]))
    assert {b["launch_ns"] for b in found["boundaries"]} == {LAUNCH_NS}
    assert {t["bound"] for t in found["tasks"]} <= {"memory", "compute", "latency"}
    assert found["one_kernel_ns"] > 0


def test_the_estimate_follows_context_and_launch(capsys: Out) -> None:
    found: list[dict[str, float]] = []
    for context, launch in ((16, 1), (256, 1), (16, 0)):
        args = ("--context", context, "--launch-us", launch, "--json")
        assert run("estimate", *STEP, *args) == 0
        found.append(json.loads(capsys.readouterr().out))
    short, full, free = found
    assert full["work_ns"] > short["work_ns"] == free["work_ns"]
    stages = len(short["boundaries"])  # type: ignore[arg-type]
    less = short["boundary_ns"] - free["boundary_ns"]
    assert less == pytest.approx(stages * LAUNCH_NS)


# ------------------------------------------------------------------------- timeline


def test_which_sm_waited_and_why(capsys: Out, tmp_path: Path) -> None:
    trace, picture = tmp_path / "t.json", tmp_path / "t.svg"
    files = ("--trace", trace, "--picture", picture, "--window", "0:20")
    assert run("timeline", *STEP, "--context", 100, "--coarse", *files) == 0
    text = capsys.readouterr().out
    assert text.startswith("coarse events\nllama_decode (simulator): ")
    assert "\nfine events\n" in text
    assert text.count(" waited longest, ") == 2
    assert "  because " in text
    assert json.loads(trace.read_text())["displayTimeUnit"] == "ns"
    assert "coarse events: " in picture.read_text()


def test_stamps_of_a_kernel(capsys: Out, tmp_path: Path) -> None:
    machine, config = simulated(), read_config(MODEL)
    step = DecodeStep(config, 1, 256, implementation="simulate", machine=machine)
    plan = step.kernel.lower(*argument_shapes(config, 1, 256)).plan
    stamps = simulate_stamps(plan, machine, {"cache.lengths": 100})
    # As a kernel does: the low half of a clock, and no stamps of pages.
    np.save(tmp_path / "stamps.npy", stamps[:, :, :8].astype(np.int32))
    args = ("--context", 100, "--stamps", tmp_path / "stamps.npy")
    assert run("timeline", *STEP, *args) == 0
    text = capsys.readouterr().out
    assert text.startswith("device\nllama_decode (device): ")
    assert len(STAMPS) > 8


# ------------------------------------------------------------------- show --picture


def test_a_picture_instead_of_text(capsys: Out, tmp_path: Path) -> None:
    path = tmp_path / "stage.png"
    assert run("show", *STEP, "--stage", "schedule", "--picture", path) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")


# --------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("estimate", "--context", 300), "300 positions do not fit in a cache of 256"),
        (("timeline", "--context", 300), "give a larger --max-length"),
        (("timeline", "--context", 9, "--picture", "x.txt"), "x.txt is no picture"),
        (("timeline", "--context", 9, "--stamps", "none.npy"), "none.npy cannot be"),
        (("timeline", "--context", 9, "--trace", "/none/x"), "cannot be written"),
        (("show", "--picture", "x.pdf"), "ends in .svg or .png"),
        (("show", "--picture", "/none/x.svg"), "/none/x.svg cannot be written"),
    ],
)
def test_errors_have_no_traceback(capsys: Out, args: tuple[str], words: str) -> None:
    command, *rest = args
    assert run(command, *STEP, *rest) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert words in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("timeline", "--window", "5"), "5 is no window; expected e.g. 0:50"),
        (("timeline", "--window", "5:1"), "5:1 is no window"),
        (("estimate", "--launch-us", "-1"), "-1 is no time"),
        (("estimate", "--context", "0"), "0 is not positive"),
    ],
)
def test_arguments_are_checked(capsys: Out, args: tuple[str], words: str) -> None:
    command, *rest = args
    with pytest.raises(SystemExit) as end:
        run(command, *STEP, *rest)
    assert end.value.code == 2
    assert words in capsys.readouterr().err
