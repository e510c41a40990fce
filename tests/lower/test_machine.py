"""Descriptions of machines: complete, sourced, and refused where the kernel cannot."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from mkdsl.errors import LaunchError
from mkdsl.lower.machine import (
    FOLDER,
    H200,
    MACHINES,
    ORIGINS,
    RTX_4090,
    Machine,
    check_runs,
    machine_for,
    read_machine,
    simulated,
)

NUMBERS = {f.name for f in fields(Machine)} - {
    "name",
    "device_kind",
    "runs_kernel",
    "sources",
}


def test_every_file_is_a_machine() -> None:
    read = {read_machine(path).name for path in FOLDER.glob("*.toml")}
    assert read == {m.name for m in MACHINES}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_every_number_has_a_source(machine: Machine) -> None:
    assert {s.name for s in machine.sources} == NUMBERS
    assert all(s.source and s.origin in ORIGINS for s in machine.sources)


def test_nothing_of_a_machine_that_never_ran_was_measured() -> None:
    assert not {s.origin for s in RTX_4090.sources} & {"measured", "device"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('origin = "device"', 'origin = "hearsay"', r"\[sms\].*one of device, meas"),
        ('source = "2026', 'note = "2026', r"\[sms\] has value, origin, note"),
        ("[sms]", "[cores]", r"unexpected keyword argument 'cores'"),
        ('name = "h200"\n', "", r"missing 1 required .*'name'"),
    ],
)
def test_a_file_with_a_fault_is_refused(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    text = (FOLDER / "nvidia_h200.toml").read_text()
    assert old in text
    path = tmp_path / "bad.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"bad.toml: .*{message}"):
        read_machine(path)


def test_machine_by_device_kind() -> None:
    assert machine_for("NVIDIA H200") is H200
    with pytest.raises(LaunchError, match=r"'cpu'; supported: 'NVIDIA H200'\n") as e:
        machine_for("cpu")
    assert "mkdsl/lower/machines/" in e.value.hint
    with pytest.raises(ValueError, match=r"holds no page"):
        replace(H200, smem_bytes=100)
    with pytest.raises(ValueError, match=r"speeds are positive"):
        replace(H200, signal_ns=-1.0)


def test_a_machine_without_kernel_is_named() -> None:
    match = r"'rtx4090' \('NVIDIA GeForce RTX 4090'\).*supported: 'NVIDIA H200'"
    with pytest.raises(LaunchError, match=match) as e:
        machine_for("NVIDIA GeForce RTX 4090")
    assert "'simulate'" in e.value.hint
    check_runs(H200)


def test_page_time_is_the_measured_one() -> None:
    assert H200.page_ns == pytest.approx(940, abs=10)
    assert simulated(7).page_ns == pytest.approx(H200.page_ns)


def test_a_small_machine_is_like_the_one_that_it_stands_for() -> None:
    small = simulated(4, like=RTX_4090)
    assert (small.sms, small.smem_bytes) == (4, RTX_4090.smem_bytes)
    assert small.page_ns == pytest.approx(RTX_4090.page_ns)
    assert not small.runs_kernel
