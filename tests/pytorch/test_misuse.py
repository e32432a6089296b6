"""Unusual and wrong uses of torch.distributed: what goes on goes on, and what cannot be says why in a sentence."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.torch

ON_META = (
    "CallError: tensor: it is on meta, and backend 'overlap' carries tensors of the CPU; pass .cpu(), or give that "
    "device a backend of its own, as in init_process_group('cpu:overlap,cuda:nccl')"
)


def end(name: str) -> Any:
    """Run a program of `misused` in a fresh interpreter, as forks must not have threads of torch."""
    command = [sys.executable, "-m", "tests.pytorch.misused", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "lost" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_tensors_of_another_device_are_refused() -> None:
    """Nothing has been started: the sum that follows is right."""
    reduced, told, gathered, sent, total = end("other_devices")
    assert [reduced, told, sent, total] == [ON_META, ON_META, ON_META, 2.0]
    assert "all tensors must be on one device, number 0 is on meta and number 1 on cpu" in gathered


def test_another_backend_takes_the_other_device() -> None:
    assert end("beside_another_backend") == [2.0, "cpu:overlap,cuda:gloo", "cpu:overlap,cuda:gloo"]


def test_a_device_id_names_an_accelerator() -> None:
    """Torch says so before it asks for a backend."""
    cpu, cuda = end("a_device")
    assert cpu == "ValueError: init_process_group device_id parameter must be an accelerator with an index"
    assert cuda.startswith("ValueError: device_id cuda:0 does not match")


def test_groups_that_are_destroyed_while_used_finish_what_was_issued() -> None:
    assert end("groups_destroyed_while_used") == [2.0, 2.0, 2.0]


def test_groups_that_are_destroyed_give_back_what_they_had() -> None:
    assert end("groups_destroyed") == [True, True, 2.0]


def test_default_groups_one_after_the_other() -> None:
    assert end("one_after_the_other") == [2.0, 2.0, 2.0]


def test_a_second_call_of_init_process_group_fails_and_harms_nothing() -> None:
    assert end("initialised_twice") == ["ValueError: trying to initialize the default process group twice!", 2.0]


def test_a_job_needs_no_store_once_it_has_met() -> None:
    assert end("a_store_that_dies") == [2.0, 2.0, 2.0, [0, 0]]


def test_calls_of_rpc_beside_it() -> None:
    assert end("remote_calls") == [1.0, 2.0, 2.0]


def test_workers_of_a_data_loader_come_and_go() -> None:
    assert end("loader_workers") == [2, 2.0]


def test_a_worker_that_communicates_hears_that_it_is_no_rank() -> None:
    told, total = end("loader_workers_that_communicate")
    assert told.startswith(
        "DistBackendError: this process is a fork of the one that has this rank, and is no rank itself"
    )
    assert total == 2.0


def test_a_port_in_use_is_named() -> None:
    told, initialised = end("a_port_in_use")
    assert told.startswith("DistNetworkError")
    assert "PORT" in told
    assert "address already in use" in told
    assert not initialised


def test_what_a_handler_of_signals_raises_in_a_wait_leaves_as_it_is() -> None:
    kinds = ("Stop", "TimeoutError", "KeyboardInterrupt")
    assert end("handlers_that_raise") == [
        each for kind in kinds for _ in range(2) for each in (f"{kind}: from a handler", 2.0)
    ]


def test_tensors_with_the_negative_bit_are_reduced_by_their_elements() -> None:
    assert end("negative_tensors") == [-3.0] * 3 + [-1.0] * 2
