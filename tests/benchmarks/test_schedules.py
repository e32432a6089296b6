"""What of schedules is timed, and how often: with a clock that steps as the fakes say."""

import pytest

from overlap.cli.bench.sampling import Sampling, Times
from tests.benchmarks import schedules

SAMPLING = Sampling(iters=7, warmup=2)


@pytest.fixture
def calls():
    """What was done, in order."""
    return []


@pytest.fixture
def faked(calls, monkeypatch):
    """The clock goes on by 1 ms for generating, 10 for proving, 100 for projecting, for each rank."""
    now_ns = 0

    def spend(name, ranks, ms):
        nonlocal now_ns
        calls.append((name, ranks))
        now_ns += ranks * ms * 1_000_000
        return ranks

    monkeypatch.setattr(schedules, "perf_counter_ns", lambda: now_ns)
    monkeypatch.setattr(schedules, "generate", lambda *asked: spend("/".join(asked[:2]), asked[2], 1))
    monkeypatch.setattr(schedules, "verify", lambda ranks: spend("verify", ranks, 10))
    monkeypatch.setattr(schedules, "project_all", lambda ranks: spend("project", ranks, 100))


def same(ns):
    return Times(median_ns=ns, p10_ns=ns, p90_ns=ns)


def test_a_proof_is_timed_without_what_it_proves(faked, calls):
    assert schedules.measure_proof(SAMPLING) == same(1024 * 10e6)
    assert calls == [("all_reduce/ring", 1024), *[("verify", 1024)] * 5]


def test_the_largest_proof_is_done_once_whatever_was_asked_for(faked, calls):
    assert schedules.measure_proof_once(SAMPLING) == same(4096 * 10e6)
    assert calls == [("all_reduce/ring", 4096), ("verify", 4096)]


def test_programs_are_made_from_nothing_in_each_sample(faked, calls):
    assert schedules.measure_compiling(SAMPLING) == same(64 * 111e6)
    assert calls == [("all_reduce/ring", 64), ("verify", 64), ("project", 64)] * 9


@pytest.mark.parametrize(
    ("measure", "expected_ns"), [(schedules.measure_costing, 2**23), (schedules.measure_costing_loads, 2**24)]
)
def test_costing_is_in_nanoseconds_without_and_with_loads(monkeypatch, calls, measure, expected_ns):
    monkeypatch.setattr(schedules, "ring_costing_s", lambda n: calls.append(n) or (2**23 / 1e9, 2**24 / 1e9))
    assert measure(SAMPLING) == same(expected_ns)
    assert calls == [1024] * 5


def test_a_look_up_is_of_what_has_been_compiled(monkeypatch, calls):
    """A first look-up costs a second, each later one 3 us; every sample is a batch of them."""
    now_ns = 0

    class Compiler:
        def __init__(self, cluster, algorithm):
            calls.append((cluster.name, cluster.world_size, algorithm))
            self.known = set()

        def compile(self, call, members, position):
            nonlocal now_ns
            key = (call, members, position)
            now_ns += 3_000 if key in self.known else 1_000_000_000
            self.known.add(key)
            calls.append((str(call), len(members)))

    monkeypatch.setattr(schedules, "Compiler", Compiler)
    monkeypatch.setattr(schedules, "perf_counter_ns", lambda: now_ns)
    assert schedules.measure_look_up(Sampling(iters=2, warmup=0)) == same(3e3)
    assert calls[0] == ("trn2.48xlarge", 64, None)
    assert calls[1:] == [("all_reduce(float32 (1048576,), op='sum')", 64)] * 2001
