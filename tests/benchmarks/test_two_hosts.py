"""Training between two emulated hosts: what is trained, how it is told, and the hosts where they are allowed."""

import json
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from overlap import run
from overlap.cli.bench.cases import NAMES, Case
from overlap.cli.bench.measuring import Result
from overlap.cli.bench.sampling import Sampling, Times
from overlap.timeline import Recorder
from tests.benchmarks.children import environment
from tests.benchmarks.two_hosts import contest, network, perceptron, programs, training
from tests.benchmarks.two_hosts.network import Host, HostsUnavailableError, two_hosts
from tests.benchmarks.two_hosts.perceptron import Perceptron, batch
from tests.emulated_hosts import emulated_hosts

# -- what is trained ---------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """A perceptron of a few weights."""
    monkeypatch.setattr(perceptron, "WIDTH", 5)
    monkeypatch.setattr(perceptron, "BATCH", 7)


def loss(model, x, y):
    for weights in model.weights:
        x = np.maximum(x @ weights, 0)
    return ((x - y) ** 2).mean()


def test_gradients_are_those_of_the_loss(small):
    """Against differences, in float64; a step this short crosses no kink of a rectifier."""
    model = Perceptron()
    model.weights = [weights.astype(np.float64) for weights in model.weights]
    model.gradients = [np.zeros_like(weights) for weights in model.weights]
    model.rectified = model.rectified.astype(np.float64)
    x, y = (part.astype(np.float64) for part in batch(0))
    dy = model.forward(x, y)
    for layer in reversed(range(perceptron.LAYERS)):
        gradient = model.backward(layer, dy)
        for place in ((0, 0), (2, 3)):
            before = model.weights[layer][place]
            model.weights[layer][place] = before + 1e-6
            above = loss(model, x, y)
            model.weights[layer][place] = before - 1e-6
            below = loss(model, x, y)
            model.weights[layer][place] = before
            assert gradient[place] == pytest.approx((above - below) / 2e-6, rel=1e-4, abs=1e-9)
        dy = model.propagate(layer)


def test_every_measure_is_told_for_all_ranks_and_the_weights_agree(small):
    told, other = run(training.train, Sampling(iters=2, warmup=1), ranks=2)
    assert other is None
    assert list(told["samples_ns"]) == list(OURS)
    assert {(len(ranks), len(ranks[0])) for ranks in told["samples_ns"].values()} == {(2, 2)}
    assert told["wrong"] == 0


def test_weights_that_differ_are_noticed(small, monkeypatch):
    monkeypatch.setattr(Perceptron, "digest", lambda model: f"{id(model):032x}".encode())
    assert run(training.train, Sampling(iters=1, warmup=0), ranks=2)[0]["wrong"] == 1


@pytest.mark.parametrize(("measure", "early"), [("one_after_the_other", False), ("overlapped", True)])
def test_only_the_overlapped_step_issues_before_its_backward_pass_ends(small, measure, early):
    async def main(rank):
        await training.MEASURES[measure](rank, Perceptron(), batch(rank.rank))
        return rank.recorder

    recorder: Recorder = run(main, ranks=2)[0]
    spans = list(recorder.spans())
    last_backward = max(span.start_ns for span in spans if span.name == "backward")
    issued = [span.info.issued_ns for span in spans if span.kind == "comm"]
    assert len(issued) == perceptron.LAYERS
    assert (min(issued) < last_backward) == early


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: pip install torch")
def test_pytorch_takes_as_many_steps_with_every_bucket_size():
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.two_hosts.ddp", '{"iters": 2, "warmup": 1}', '["4", "25"]'],
        env=environment() | world,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    samples_ns = json.loads(done.stdout)["samples_ns"]
    assert {bucket: [*map(len, ranks)] for bucket, ranks in samples_ns.items()} == {"4": [2], "25": [2]}


# -- what is told ------------------------------------------------------------------------------------------------

MS = 10**6

OURS = {
    "head": 50,
    "compute": 150,
    "communicate": 280,
    "one_after_the_other": 460,
    "overlapped": 340,
    "without_barrier": 300,
    "with_layer": 306,
}
DDP = {"1": 400, "4": 374, "25": 476}


class Pair:
    """Hosts that are not there."""

    def __enter__(self):
        return Host(index=0, pid=1), Host(index=1, pid=2)

    def __exit__(self, *_):
        pass


@pytest.fixture
def known(monkeypatch):
    """Measures that are known, in milliseconds; the slower rank counts."""

    def all_reduces(hosts, cases, sampling, *, rails):
        ms = cases[0].size_bytes / (1 << 20) * {1: 9, 2: 4.5}[rails]
        return [Result(case=case, times=Times.of_samples([ms * MS]), wrong=0) for case in cases]

    def told(by_name):
        return {name: [[ms * MS], [(ms - 1) * MS]] for name, ms in by_name.items()}

    monkeypatch.setattr(contest, "two_hosts", lambda **_: Pair())
    monkeypatch.setattr(contest, "our_steps", lambda *_: {"samples_ns": told(OURS), "wrong": 0})
    monkeypatch.setattr(contest, "ddp_steps", lambda *_: {"samples_ns": told(DDP), "version": "PyTorch 2"})
    monkeypatch.setattr(contest, "all_reduces", all_reduces)

    def raw_exchanges(hosts, sampling, sizes):
        return {str(size): [size * 9 * MS >> 20] for size in sizes}

    def torch_all_reduces(hosts, sampling, sizes):
        return [{"gloo": [size * 10 * MS >> 20], "overlap": [size * 9 * MS >> 20]} for size in sizes]

    monkeypatch.setattr(contest, "raw_exchanges", raw_exchanges)
    monkeypatch.setattr(contest, "torch_all_reduces", torch_all_reduces)
    monkeypatch.setattr(contest, "real_and_virtual_ns", lambda hosts, alone: (300 * MS, 294 * MS))
    monkeypatch.setattr(contest, "find_spec", lambda name: True)


def test_the_whole_contest(benchmarks, known):
    assert benchmarks("two_hosts") == (
        0,
        """\
# figure                                                   median  p10 - p90          aim
# two network namespaces, links of 1 Gbit/s; 8 layers of 1024 x 1024, batch 256 a rank, float32, one rank on each
all_reduce, 1 MiB, alone                                     9 ms  9 ms - 9 ms
  as fast as a bare socket (9 ms)                           1.00x                     >= 0.952x  met
all_reduce, 4 MiB, alone                                    36 ms  36 ms - 36 ms
  as fast as a bare socket (36 ms)                          1.00x                     >= 0.952x  met
all_reduce, 16 MiB, alone                                  144 ms  144 ms - 144 ms
  as fast as a bare socket (144 ms)                         1.00x                     >= 0.952x  met
forward, and backward of one layer                          50 ms  50 ms - 50 ms
compute of a step                                          150 ms  150 ms - 150 ms
all-reduce of all gradients                                280 ms  280 ms - 280 ms
step, one after the other                                  460 ms  460 ms - 460 ms
step, overlapped                                           340 ms  340 ms - 340 ms
step, overlapped, without a barrier                        300 ms  300 ms - 300 ms    <= 300 ms  met
step, with DataParallel                                    306 ms  306 ms - 306 ms
  as fast as possible (330 ms)                              0.97x                     >= 0.952x  met
  as fast as by futures alone (300 ms)                      0.98x                     >= 0.971x  met
  as fast as one after the other (460 ms)                   1.35x
all_reduce of PyTorch, 64 KiB                              562 us  562 us - 562 us
  as fast as on gloo (625 us)                               1.11x                     >= 1x      met
all_reduce of PyTorch, 1 MiB                                 9 ms  9 ms - 9 ms
  as fast as on gloo (10 ms)                                1.11x                     >= 1x      met
all_reduce of PyTorch, 4 MiB                                36 ms  36 ms - 36 ms
  as fast as on gloo (40 ms)                                1.11x                     >= 1x      met
all_reduce of PyTorch, 16 MiB                              144 ms  144 ms - 144 ms
  as fast as on gloo (160 ms)                               1.11x                     >= 1x      met
# DDP is DistributedDataParallel of PyTorch 2 on gloo
  as fast as DDP with its defaults (476 ms)                 1.59x                     >= 1.5x    met
  as fast as DDP with its best buckets, 4 MiB (374 ms)      1.25x                     >= 1.2x    met
  the virtual clock (294 ms): as long as 300 ms             0.98x                     >= 0.97x   met
all_reduce, 4 MiB, 1 link                                   36 ms  36 ms - 36 ms
all_reduce, 4 MiB, 2 links                                  18 ms  18 ms - 18 ms
  two links: as fast as one                                 2.00x                     >= 1.9x    met
all_reduce, 64 MiB, 1 link                                 576 ms  576 ms - 576 ms
all_reduce, 64 MiB, 2 links                                288 ms  288 ms - 288 ms
  two links: as fast as one                                 2.00x                     >= 1.9x    met
# 15 of 15 aims met
""",
        "",
    )


def test_wrong_weights_fail_the_command(benchmarks, known, monkeypatch):
    told = {"samples_ns": {name: [[1], [1]] for name in OURS}, "wrong": 1}
    monkeypatch.setattr(contest, "our_steps", lambda *_: told)
    assert benchmarks("two_hosts")[0] == 1


def test_without_torch_the_rest_is_told(benchmarks, known, monkeypatch):
    monkeypatch.setattr(contest, "find_spec", lambda name: None)
    code, out, _ = benchmarks("two_hosts")
    assert code == 0
    assert "# torch is not installed: pip install torch\n" in out
    assert out.endswith("# 9 of 9 aims met\n")


# -- the hosts ---------------------------------------------------------------------------------------------------


def test_a_missing_tool_is_told_with_the_command_that_installs_it(benchmarks, monkeypatch):
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    code, out, err = benchmarks("two_hosts")
    assert (code, err) == (0, "")
    assert out.splitlines()[1:] == ["# tc is not installed: apt-get install iproute2", "# 0 of 0 aims met"]


def test_missing_rights_are_told(monkeypatch, tmp_path):
    for tool in ("unshare", "nsenter", "ip", "tc"):
        (tmp_path / tool).write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with (
        pytest.raises(HostsUnavailableError, match="no rights to make a network namespace: unshare failed: Operation"),
        two_hosts(links=1, bits_per_s=10**9),
    ):
        pass


@pytest.fixture
def joined():
    """Two hosts with two links, on a machine that allows it."""
    return emulated_hosts(links=2, bits_per_s=10**9)


def shown(host, *command):
    return json.loads(subprocess.run([*host.enter, *command], capture_output=True, check=True, timeout=60).stdout)


def test_two_hosts_are_joined_by_shaped_links_and_then_gone(joined):
    with joined as pair:
        for host in pair:
            for link in range(2):
                [state] = shown(host, "ip", "-json", "address", "show", "dev", f"rail{link}")
                [address] = [one["local"] for one in state["addr_info"] if one["family"] == "inet"]
                assert (address, "UP" in state["flags"]) == (f"10.77.{link}.{host.index + 1}", True)
                [shape] = shown(host, "tc", "-json", "qdisc", "show", "dev", f"rail{link}")
                assert (shape["kind"], shape["options"]["rate"]) == ("tbf", 10**9 // 8)
        held = [Path("/proc", str(host.pid)).exists() for host in pair]
    assert held == [True, True]
    assert not any(Path("/proc", str(host.pid)).exists() for host in pair)


@pytest.mark.slow
def test_a_step_between_two_hosts(joined):
    with joined as pair:
        told = programs.our_steps(pair, Sampling(iters=1, warmup=0))
    assert told["wrong"] == 0
    assert {len(ranks) for ranks in told["samples_ns"].values()} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("rails", [1, 2])
def test_results_stay_exact_over_links_that_lose_packets(joined, rails):
    """A queue holds two packets, and whichever way TCP finds its rate, it hands over more than these at once."""
    with joined as pair:
        for host in pair:
            shape = ["rate", f"{10**9}bit", "burst", "4kb", "limit", "4kb"]
            host.run("tc", "qdisc", "change", "dev", "rail0", "root", "tbf", *shape)
        rows = programs.all_reduces(pair, [case(1 << 22)], Sampling(iters=10, warmup=0), rails=rails)
        repeated = [sent_again(host) for host in pair]
    assert [row.wrong for row in rows] == [0]
    assert sum(repeated) > 0


@pytest.mark.slow
@pytest.mark.parametrize("rails", [1, 2])
def test_a_receiver_whose_loop_stands_still_gets_everything(joined, rails):
    with joined as pair:
        assert programs.echoed(pair, rails=rails) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("rails", "how", "for_s"), [(1, "slow", 2), (1, "down", 3), (1, "down", 10), (2, "down", 3)])
def test_results_stay_exact_over_links_that_stall_for_seconds(joined, rails, how, for_s):
    """Less than it takes to give a host up: what was lost is sent again, and the links are used again."""
    over, stalled = threading.Event(), []

    def set_links(host, *, well):
        for link in (f"rail{each}" for each in range(rails)):
            if how == "down":
                host.run("ip", "link", "set", link, "up" if well else "down")
            else:
                shape = ["rate", f"{10**9}bit" if well else "8kbit", "burst", "256kb", "latency", "100ms"]
                host.run("tc", "qdisc", "change", "dev", link, "root", "tbf", *shape)

    def stall(host):
        while received_bytes(host) < 32 << 20 and not over.wait(0.01):
            pass
        set_links(host, well=False)
        stalled.append(not over.wait(for_s))
        set_links(host, well=True)

    with joined as pair:
        stalling = threading.Thread(target=stall, args=[pair[0]])
        stalling.start()
        try:
            longer = ["--outage", "15"] if for_s > 3 else []
            sampling = Sampling(iters=150, warmup=0)
            rows = programs.all_reduces(pair, [case(1 << 22)], sampling, rails=rails, options=longer)
        finally:
            over.set()
            stalling.join()
    assert [row.wrong for row in rows] == [0]
    assert stalled == [True]


def case(nbytes):
    dtype = np.dtype(np.float32)
    return Case(operation=NAMES["all_reduce"], ranks=2, count=nbytes // 4, dtype=dtype, in_place=True)


def sent_again(host):
    """Return how many segments TCP has sent again there."""
    names, values = (
        line.split() for line in Path(f"/proc/{host.pid}/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


def received_bytes(host):
    """Return how much has come there over all links."""
    lines = Path(f"/proc/{host.pid}/net/dev").read_text().splitlines()
    return sum(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("rail"))
