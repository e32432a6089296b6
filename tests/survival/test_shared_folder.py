"""Hosts compare what their launchers have written into the folder of the witness with what the others send."""

import trio

from overlap.errors import UsageError
from overlap.processes import shared_folder
from overlap.processes.place import Place
from overlap.processes.shared_folder import check_shared_folder, host_file


class Exchange:
    """The exchanges of two processes of one world."""

    def __init__(self):
        self.parts, self.complete = {}, {}

    def of(self, member):
        return Member(self, member)


class Member:
    def __init__(self, exchange, member):
        self.all, self.member = exchange, member

    async def exchange(self, name, part):
        parts = self.all.parts.setdefault(name, {})
        parts[self.member] = part
        complete = self.all.complete.setdefault(name, trio.Event())
        if len(parts) == 2:
            complete.set()
        await complete.wait()
        return [parts[0], parts[1]]


def check(monkeypatch, folder, timeout_s):
    """Return what the check of each of two hosts raises, if anything."""
    refusals = {}

    async def of_host(exchange, host):
        place = Place(source="test", process=host, processes=2, ranks_per_process=1, node=host, nodes=2,
                      endpoint=("127.0.0.1", 1), job="test")  # fmt: skip
        try:
            await check_shared_folder(place, exchange.of(host), timeout_s)
        except UsageError as error:
            refusals[host] = str(error)

    async def main():
        exchange = Exchange()
        async with trio.open_nursery() as nursery:
            for host in range(2):
                nursery.start_soon(of_host, exchange, host)

    for name, value in {"WITNESS": folder, "HOSTS": 2, "NNODES": 2}.items():
        monkeypatch.setenv(f"OVERLAP_{name}", str(value))
    monkeypatch.setattr(shared_folder, "_checked", [])
    monkeypatch.setattr(shared_folder, "_PAUSE_S", 0.001)
    trio.run(main)
    return refusals


def test_a_number_that_is_seen_late_is_read_again(monkeypatch, tmp_path):
    host_file(tmp_path, 0).write_text("11 a")
    host_file(tmp_path, 1).write_text("22 b")
    read, looks = shared_folder._read, []

    async def read_late(folder, host):
        looks.append(host)
        return b"" if len(looks) in (3, 4, 5) else await read(folder, host)

    monkeypatch.setattr(shared_folder, "_read", read_late)
    assert check(monkeypatch, tmp_path, 60.0) == {}
    assert len(looks) == 7  # each its own, and the other's until both were there


def test_a_number_of_an_earlier_job_is_refused_on_all_hosts_by_name(monkeypatch, tmp_path):
    host_file(tmp_path, 0).write_text("11 a")
    host_file(tmp_path, 1).write_text("22 b")
    exchanged = Member.exchange

    async def send_another(self, name, part):  # than stands in the folder that host 0 reads
        return await exchanged(self, name, b"33 b" if part == b"22 b" else part)

    monkeypatch.setattr(Member, "exchange", send_another)
    refusals = check(monkeypatch, tmp_path, 0.02)
    refusal = f"--witness: node 0 (a) cannot read the file of node 1 (b) in {tmp_path}; name a folder on a file system"
    assert refusals == dict.fromkeys(range(2), f"{refusal} that all hosts share")


def test_a_missing_file_is_not_equal_to_a_missing_file(monkeypatch, tmp_path):
    assert check(monkeypatch, tmp_path, 0.02).keys() == {0, 1}
