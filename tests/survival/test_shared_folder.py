"""All hosts must read in the folder of the witness what the launcher of the first one has written there."""

import socket
from contextvars import ContextVar

import trio

from overlap.errors import UsageError
from overlap.processes import shared_folder
from overlap.processes.place import ProcessPlace
from overlap.processes.shared_folder import check_shared_folder, host_file

host = ContextVar[int]("host")


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

    async def of_host(exchange, number):
        host.set(number)
        place = ProcessPlace(source="test", process=number, processes=2, ranks_per_process=1, node=number, nodes=2,
                      endpoint=("127.0.0.1", 1), job="test")  # fmt: skip
        try:
            await check_shared_folder(place, exchange.of(number), timeout_s)
        except UsageError as error:
            refusals[number] = str(error)

    async def main():
        exchange = Exchange()
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(of_host, exchange, number)

    for name, value in {"WITNESS": folder, "HOSTS": 2, "NNODES": 2}.items():
        monkeypatch.setenv(f"OVERLAP_{name}", str(value))
    monkeypatch.setattr(shared_folder, "_checked", [])
    monkeypatch.setattr(shared_folder, "_PAUSE_S", 0.001)
    trio.run(main)
    return refusals


def test_a_number_that_is_seen_late_is_read_again(monkeypatch, tmp_path):
    host_file(tmp_path, 0).write_text("11 a")
    read, looks = shared_folder._read, []

    async def read_late(folder):
        looks.append(folder)
        return b"" if len(looks) in (3, 4) else await read(folder)

    monkeypatch.setattr(shared_folder, "_read", read_late)
    assert check(monkeypatch, tmp_path, 60.0) == {}
    assert len(looks) == 6  # each before the first one sends it, and then until it is there


def test_a_number_of_an_earlier_job_is_refused_on_all_hosts_by_name(monkeypatch, tmp_path):
    host_file(tmp_path, 0).write_text("11 a")
    read = shared_folder._read

    async def read_another(folder):  # in the folder of host 1
        return b"22 a" if host.get() else await read(folder)

    monkeypatch.setattr(shared_folder, "_read", read_another)
    refusals = check(monkeypatch, tmp_path, 0.02)
    name = socket.gethostname()
    refusal = (
        f"--witness: node 1 ({name}) does not read in {tmp_path} what node 0 has written there; name a folder on a"
    )
    assert refusals == dict.fromkeys(range(2), f"{refusal} file system that all hosts share")


def test_a_missing_file_is_not_equal_to_a_missing_file(monkeypatch, tmp_path):
    assert check(monkeypatch, tmp_path, 0.02).keys() == {0, 1}
