"""The plain machine's figures from measurements: found again where a machine has made them, and said how far off."""

from dataclasses import replace

import pytest

from overlap.collectives.cost.own import OwnSample, fit_own, machine_of
from overlap.collectives.select import DIRECT, plan
from topology import Cluster, cluster

INSIDE = {"meeting_s": 23e-6, "memory_bytes_per_s": 7e9, "cached_bytes": 3e6, "cached_bytes_per_s": 40e9}
OPERATIONS = ("all_reduce", "all_gather", "broadcast")
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)


def samples(machine, *, ranks, processes, only):
    where = Cluster.of(machine, nodes=processes, ranks=ranks)
    for operation in OPERATIONS:
        for nbytes in SIZES:
            time_s = plan(operation, nbytes, where, algorithm=only).predicted_s
            yield OwnSample(
                collective=operation, nbytes=nbytes, ranks=ranks, processes=processes, time_s=time_s
            )  # fmt: skip


def test_figures_of_a_process_are_found_again():
    machine = machine_of(cluster("local").machine, INSIDE, {}, 2)
    told = [each for ranks in (2, 4) for each in samples(machine, ranks=ranks, processes=1, only=DIRECT)]
    found = fit_own(told, cores=2)
    for name, within in (("meeting_s", 0.05), ("memory_bytes_per_s", 0.05), ("cached_bytes", 0.2)):
        assert found.inside[name] == pytest.approx(INSIDE[name], rel=within)
    assert not found.between
    assert found.errors(left_out=True)[0] == 8
    assert found.errors(left_out=True)[2] < 0.02


def test_one_row_that_was_spoilt_draws_no_figure():
    machine = machine_of(cluster("local").machine, INSIDE, {}, 2)
    told = [each for ranks in (2, 4) for each in samples(machine, ranks=ranks, processes=1, only=DIRECT)]
    told[3] = replace(told[3], time_s=10 * told[3].time_s)
    found = fit_own(told, cores=2)
    assert found.inside["memory_bytes_per_s"] == pytest.approx(INSIDE["memory_bytes_per_s"], rel=0.05)


def test_small_vectors_get_what_caches_give():
    machine = machine_of(cluster("local").machine, INSIDE, {}, 2)
    small_s, large_s = (
        plan("all_reduce", nbytes, Cluster.of(machine, ranks=2), algorithm=DIRECT).predicted_s
        for nbytes in (500_000, 5_000_000)
    )
    assert small_s == pytest.approx(2 * 23e-6 + 2e6 / 40e9)
    assert large_s == pytest.approx(2 * 23e-6 + 3e6 / 40e9 + 17e6 / 7e9)


@pytest.mark.slow
def test_what_processes_take_is_predicted_within_the_aim():
    between = {
        "launch_s": 200e-6,
        "step_s": 30e-6,
        "busy_s": 40e-6,
        "busy_bytes_per_s": 3e9,
        "reducer_bytes_per_s": 8e9,
    }
    machine = machine_of(cluster("local").machine, INSIDE, between, 2)
    told = [*samples(machine, ranks=2, processes=1, only=DIRECT), *samples(machine, ranks=2, processes=2, only=None)]
    found = fit_own(told, cores=2)
    assert found.errors(left_out=True)[2] < 0.15
