"""The plain machine's figures from measurements: found again where a machine has made them, and said how far off."""

from dataclasses import replace

import pytest

from overlap.cost.fitting import Sample
from overlap.cost.own import fit_own, set_figures
from overlap.cost.select import DIRECT, plan
from topology import Cluster, cluster

INSIDE = {
    "meeting_s": 23e-6,
    "piece_s": 2e-6,
    "cached_bytes": 1.5e6,
    "cached_bytes_per_s": 40e9,
    "memory_bytes_per_s": 15e9,
    "handing_s": 200e-6,
    "spread_bytes": 50e6,
    "spread_bytes_per_s": 35e9,
    "copied_bytes_per_s": 25e9,
}
SHARING = {"meeting_s": 30e-6, "phase_s": 40e-6, "memory_bytes_per_s": 12e9}
OPERATIONS = ("all_reduce", "all_gather", "broadcast")
SIZES = (1 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)


def samples(machine, *, ranks, processes, only):
    where = Cluster.of(machine, nodes=processes, ranks=ranks)
    for operation in OPERATIONS:
        for nbytes in SIZES:
            time_s = plan(operation, nbytes, where, algorithm=only).predicted_s
            yield Sample(
                collective=operation, nbytes=nbytes, ranks=tuple(range(ranks)), processes=processes, time_s=time_s
            )  # fmt: skip


def test_figures_of_a_process_are_found_again():
    machine = set_figures(cluster("local").machine, INSIDE, {}, 2)
    told = [each for ranks in (2, 4) for each in samples(machine, ranks=ranks, processes=1, only=DIRECT)]
    found = fit_own(told, cores=2)
    for name in ("meeting_s", "memory_bytes_per_s", "handing_s", "cached_bytes"):
        assert found.inside[name] == pytest.approx(INSIDE[name], rel=0.2)
    assert not found.between
    assert found.errors(left_out=True)[0] == 12
    assert found.errors(left_out=True)[2] < 0.1


@pytest.mark.slow
def test_one_row_that_was_spoilt_draws_no_figure():
    machine = set_figures(cluster("local").machine, INSIDE, {}, 2)
    told = [each for ranks in (2, 4) for each in samples(machine, ranks=ranks, processes=1, only=DIRECT)]
    told[3] = replace(told[3], time_s=10 * told[3].time_s)
    found = fit_own(told, cores=2)
    assert max(abs(row.error) for row in found.rows if row.sample is not told[3]) < 0.1


@pytest.mark.slow
def test_figures_of_processes_that_share_memory_are_found_again():
    machine = set_figures(cluster("local").machine, INSIDE, SHARING, 2)
    worlds = ((2, 1), (4, 1), (2, 2))
    told = [each for ranks, count in worlds for each in samples(machine, ranks=ranks, processes=count, only=DIRECT)]
    found = fit_own(told, cores=2, shared_memory=True)
    assert set(found.between) == set(SHARING)
    assert found.errors(left_out=True)[0] == 18
    assert found.errors(left_out=True)[2] < 0.1


@pytest.mark.parametrize(
    ("operation", "nbytes", "expected_s"),
    [
        ("gather", 500_000, (2 * 23e-6 + 2 * 2e-6) + 1e6 / 40e9),
        ("gather", 1_000_000, (2 * 23e-6 + 2 * 2e-6) + 1.5e6 / 40e9 + 0.5e6 / 15e9),
        ("gather", 2_000_000, (2 * 23e-6 + 2 * 2e-6) + 200e-6 + 4e6 / 35e9),
        ("all_to_all", 20_000_000, (2 * 23e-6 + 4 * 2e-6) + 200e-6 + 50e6 / 35e9 + 30e6 / 15e9),
        ("all_reduce", 4_000_000, 2 * 23e-6 + 200e-6 + 16e6 / 35e9 + 4e6 / 25e9),
    ],
)
def test_in_a_process_caches_are_near_and_threads_have_to_be_told(operation, nbytes, expected_s):
    machine = set_figures(cluster("local").machine, INSIDE, {}, 2)
    found = plan(operation, nbytes, Cluster.of(machine, ranks=2), algorithm=DIRECT)
    assert found.predicted_s == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("operation", "nbytes", "phases", "touched"),
    [
        ("all_reduce", 1 << 10, 1, 2 + 3),  # mapped, and read with one's own
        ("all_reduce", 1 << 20, 2, 2 + 3),
        ("reduce_scatter", 1 << 20, 2, 2 + 1.5),
        ("all_gather", 1 << 20, 2, 1 + 2),
        ("scatter", 1 << 20, 2, 2 + 1),
        ("all_reduce", 4 << 20, 3, 3.5),  # half of it read and added, then the other half read
        ("broadcast", 4 << 20, 2, 2),
        ("reduce", 4 << 20, 2, 5),
    ],
)
def test_between_processes_each_rank_reads_what_it_needs(operation, nbytes, phases, touched):
    machine = set_figures(cluster("local").machine, INSIDE, SHARING, 2)
    found = plan(operation, nbytes, Cluster.of(machine, nodes=2, ranks=2), algorithm=DIRECT)
    near = min(touched * nbytes, 1.5e6)
    threads_s = 200e-6 if nbytes > 1 << 20 else 0
    expected_s = 30e-6 + phases * 40e-6 + threads_s + near / 40e9 + (touched * nbytes - near) / 12e9
    assert (found.algorithm, found.predicted_s) == (DIRECT, pytest.approx(expected_s))
    four = plan("broadcast", 1 << 10, Cluster.of(machine, nodes=4, ranks=4))  # take turns on two cores
    assert four.predicted_s == pytest.approx(2 * (30e-6 + 2 * 40e-6 + 4 * 1024 / 40e9))


@pytest.mark.slow
def test_what_processes_take_is_predicted_within_the_aim():
    between = {
        "launch_s": 200e-6,
        "step_s": 30e-6,
        "busy_s": 40e-6,
        "busy_bytes_per_s": 3e9,
        "reducer_bytes_per_s": 8e9,
    }
    machine = set_figures(cluster("local").machine, INSIDE, between, 2)
    told = [each for ranks in (2, 4) for each in samples(machine, ranks=ranks, processes=1, only=DIRECT)]
    told += samples(machine, ranks=2, processes=2, only=None)
    found = fit_own(told, cores=2)
    assert found.errors(left_out=True)[2] < 0.15
