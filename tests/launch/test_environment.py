import os
import signal
import sys
import types
from pathlib import Path

import pytest
import trio

from overlap import UsageError
from overlap.processes.introduce import introduce_by_mpi
from overlap.processes.launchers import first_host, is_loopback
from overlap.processes.place import ProcessPlace, find_place, member_variables, without_launcher_variables
from tests import interpreters
from tests.errors import error_of

SECRET = {"OVERLAP_SECRET": "0123456789abcdef" * 4}
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", **MASTER,
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_NAMESPACE": "prterun-a@1",
}  # fmt: skip
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2",
    "SLURM_STEP_ID": "3", "SLURM_JOB_ID": "100", "SLURM_STEP_NODELIST": "trn[07-08]",
}  # fmt: skip


def own(**changes):
    given = {"node": 1, "nodes": 2, "ranks_per_node": 4, "endpoint": ("127.0.0.1", 4000), "job": "j", "descriptors": {}}
    return member_variables(**given | changes)


def refusal(environ):
    return str(error_of(UsageError, find_place, environ))


# -- each launcher -----------------------------------------------------------------------------------------------


def test_what_overlap_run_sets_is_read_back():
    environ = own(descriptors={"listener": 7, "lifeline": 8})
    assert find_place(environ) == ProcessPlace(
        source="overlap run", process=1, processes=2, ranks_per_process=4, node=1, nodes=2,
        endpoint=("127.0.0.1", 4000), job="j", listener=7,
    )  # fmt: skip
    torch = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
    assert [environ[name] for name in torch] == ["4", "8", "0", "4", "1", "127.0.0.1", "4001"]


def test_the_ranks_of_a_place():
    place = find_place(own())
    assert (place.ranks, place.world_size) == (range(4, 8), 8)


def test_torchrun():
    place = find_place(TORCHRUN | SECRET)
    assert (place.source, place.process, place.processes, place.node, place.nodes) == ("torchrun", 5, 8, 1, 2)
    assert (place.ranks_per_process, place.endpoint, place.job) == (1, ("10.0.0.1", 29501), "abc.2")
    assert place.secret == bytes.fromhex(SECRET["OVERLAP_SECRET"])


def test_the_port_is_free_when_torchruns_agent_does_not_listen_there():
    assert find_place(TORCHRUN | SECRET | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).endpoint == ("10.0.0.1", 29500)
    assert find_place(TORCHRUN | SECRET | {"MASTER_PORT": "65535"}).endpoint == ("10.0.0.1", 65534)


def test_torchrun_on_one_machine_meets_on_loopback_and_needs_no_secret():
    here = {"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "0", "MASTER_ADDR": "myhost"}
    place = find_place(TORCHRUN | here)
    assert (place.endpoint, place.nodes, place.secret) == (("127.0.0.1", 29501), 1, None)


def test_variables_set_by_hand():
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", **MASTER}
    apart, together = find_place(by_hand | SECRET), find_place(by_hand | {"MASTER_ADDR": "localhost"})
    assert (apart.node, apart.nodes, apart.endpoint) == (1, 2, ("10.0.0.1", 29500))
    assert (together.node, together.nodes) == (0, 1)


def test_jobs_without_a_name_are_told_apart_by_their_ports():
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", **MASTER, **SECRET}
    assert find_place(by_hand).unique_job_name == "overlap-port29500"
    assert find_place(by_hand | {"OVERLAP_JOB": "mine"}).unique_job_name == "mine"


@pytest.mark.parametrize(
    ("environ", "source", "job"), [(OPEN_MPI, "Open MPI", "prterun-a@1"), (MPICH, "MPICH", "overlap")]
)
def test_mpi_introduces_the_processes_itself(environ, source, job):
    place = find_place(environ)
    assert (place.source, place.process, place.processes, place.node, place.nodes) == (source, 5, 8, 1, 2)
    assert (place.endpoint, place.secret, place.job) == (None, None, job)
    assert find_place(environ | MASTER | SECRET).endpoint == ("10.0.0.1", 29500)


def test_slurm():
    place = find_place(SLURM | SECRET)
    assert (place.source, place.process, place.processes, place.node, place.nodes) == ("Slurm", 5, 8, 1, 2)
    assert (place.endpoint, place.job) == (("trn07", 15000 + 31 * 100 + 3), "slurm-100.3.0")


def test_the_step_counts_and_not_the_job():
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    assert find_place(SLURM | SECRET | step).processes == 2


CYCLIC = {"SLURM_NTASKS": "4", "SLURM_DISTRIBUTION": "cyclic:block"}
LISTED = {"SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
UNEQUAL = {"SLURM_NTASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
UNEVEN = {"SLURM_NTASKS": "3"}


@pytest.mark.parametrize(
    ("variables", "tasks"),  # by task: its node, and the tasks there
    [
        (CYCLIC, [("0", ""), ("1", ""), ("0", ""), ("1", "")]),
        (LISTED, [("0", "0,2"), ("1", "1,3"), ("0", "0,2"), ("1", "1,3")]),
        (UNEQUAL, [("0", ""), ("0", ""), ("1", "")]),
        (UNEQUAL, [("0", "0,2"), ("1", "1"), ("0", "0,2")]),
        (UNEVEN, [("0", "0,1"), ("0", "0,1"), ("1", "2")]),
    ],
)
def test_tasks_of_slurm_in_another_order_or_number_are_nodes_of_their_own(variables, tasks):
    for task, (node, here) in enumerate(tasks):
        place = find_place(
            SLURM | SECRET | variables | {"SLURM_PROCID": str(task), "SLURM_NODEID": node, "SLURM_GTIDS": here}
        )
        assert (place.process, place.processes, place.node, place.nodes) == (task, len(tasks), task, len(tasks))


def test_one_task_on_each_node_of_slurm_is_in_order_however_they_are_dealt():
    told = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_DISTRIBUTION": "cyclic"}
    assert find_place(SLURM | SECRET | told).process == 1


def test_a_batch_script_is_one_process():
    assert find_place({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}) is None


ALONE = {"RANK": "0", "WORLD_SIZE": "1"}, {"PMI_RANK": "0", "PMI_SIZE": "1"}, {"OVERLAP_NNODES": "4"}


@pytest.mark.parametrize("environ", [{}, *ALONE, own(node=0, nodes=1)])
def test_a_world_of_one_process_has_no_place(environ):
    assert find_place(environ) is None


def test_empty_variables_count_as_unset():
    assert find_place(dict.fromkeys([*TORCHRUN, *SLURM, *own()], "")) is None


# -- several at once ---------------------------------------------------------------------------------------------


def test_launchers_that_agree():
    assert find_place(TORCHRUN | SLURM | MPICH | SECRET).source == "torchrun"


def test_two_launchers_that_disagree_end_it_with_both_values():
    assert refusal(TORCHRUN | MPICH | SECRET | {"PMI_RANK": "6", "MPI_LOCALRANKID": "2"}) == (
        "two launchers disagree: process 5 of 8 by torchrun, 6 of 8 by MPICH; unset the variables of one"
    )


def test_torchrun_started_by_srun_once_a_node():
    agents = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    assert find_place(TORCHRUN | SLURM | SECRET | agents).process == 5
    agents |= {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}
    assert "two launchers disagree" in refusal(TORCHRUN | SLURM | SECRET | agents)


def test_one_process_of_an_outer_launcher_contradicts_nothing():
    assert find_place(TORCHRUN | SECRET | {"PMI_RANK": "0", "PMI_SIZE": "1"}).process == 5


def test_our_own_names_win_over_other_launchers():
    assert find_place(own() | SLURM | MPICH).source == "overlap run"


@pytest.mark.parametrize(("name", "value", "made"), [("RANK", "3", 4), ("WORLD_SIZE", "4", 8)])
def test_our_own_names_must_agree_with_torchs(name, value, made):
    assert refusal(own() | {name: value}) == (
        f"{name}={value} does not fit OVERLAP_NODE_RANK=1, OVERLAP_NNODES=2, OVERLAP_NPROC_PER_NODE=4, "
        f"which make it {made}; unset one of them"
    )


def test_what_a_member_starts_is_no_member():
    environ = own() | {"OVERLAP_MEMBER_PID": str(os.getpid())}
    assert find_place(environ).process == 1
    assert find_place(environ | {"OVERLAP_MEMBER_PID": str(os.getpid() + 1)}) is None


def test_membership_is_taken_out_of_an_environment():
    others = {"HOME": "/", "OVERLAP_RAILS": "2"}
    assert without_launcher_variables(own() | {"OVERLAP_MEMBER_PID": "1"} | others) == others


# -- ranks, nodes, settings --------------------------------------------------------------------------------------


def test_several_ranks_in_each_process_of_another_launcher():
    place = find_place(MPICH | {"OVERLAP_RANKS": "32", "OVERLAP_NNODES": "4"})
    assert (place.ranks_per_process, place.ranks) == (4, range(20, 24))
    assert (place.node, place.nodes) == (2, 4)


def test_processes_of_several_machines_may_be_one_node():
    place = find_place(MPICH | {"OVERLAP_NNODES": "1"})
    assert (place.node, place.nodes, place.process, place.processes) == (0, 1, 5, 8)


def test_the_secret_shows_nowhere():
    place = find_place(TORCHRUN | SECRET)
    assert "0123456789" not in repr(place)
    assert repr(place.secret) not in repr(place)


# -- what cannot be meant ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: expected a whole number from 0 to 2147483647, got 'x'"),
        ({"RANK": "1", "WORLD_SIZE": "0"}, "WORLD_SIZE: expected a whole number from 1 to 2147483647, got '0'"),
        ({"RANK": "٣", "WORLD_SIZE": "4"}, "RANK: expected a whole number from 0 to 2147483647, got '٣'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is too large: with WORLD_SIZE=2 it can be 0 to 1"),
        ({"RANK": "1"}, "RANK=1 (torchrun) needs WORLD_SIZE, which is not set"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE=4 (MPICH) needs PMI_RANK, which is not set"),
        (TORCHRUN, "no secret: whatever reaches 10.0.0.1:29501 could join the job; give every process the same "),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT: expected a whole number from 1 to 65535, got '70000'"),
        (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_ADDR=10.0.0.1 needs MASTER_PORT"),
        (TORCHRUN | {"GROUP_RANK": "0"}, "torchrun: nodes must have equally many processes, in order; process 5 of 8"),
        (MPICH | {"MPI_LOCALNRANKS": "3"}, "MPICH: nodes must have equally many processes, in order; this is"),
        (MPICH | {"MPI_LOCALRANKID": "2"}, "MPICH: nodes must have equally many processes, in order; this is"),
        (SLURM | {"SLURM_STEP_NODELIST": "[1"}, "SLURM_STEP_NODELIST: expected a host list such as node[01-03,7]"),
        (MPICH | {"OVERLAP_RANKS": "12"}, "OVERLAP_RANKS: 12 ranks cannot be divided among the 8 processes of MPICH"),
        (MPICH | {"OVERLAP_NNODES": "3"}, "OVERLAP_NNODES=3: does not divide the 8 processes of MPICH"),
        (MPICH | {"OVERLAP_RDZV_ENDPOINT": "here"}, "OVERLAP_RDZV_ENDPOINT: "),
        (MPICH | {"OVERLAP_RDZV_ENDPOINT": "here:0"}, "OVERLAP_RDZV_ENDPOINT: 'here:0' has no port"),
        (own(job="x" * 65), "job: expected at most 64 printable characters, got 'xxx"),
        ({"OVERLAP_NODE_RANK": "1"}, "OVERLAP_NODE_RANK=1 needs OVERLAP_NNODES, the number of nodes"),
        ({"OVERLAP_NODE_RANK": "2", "OVERLAP_NNODES": "2"}, "OVERLAP_NODE_RANK: expected 0 to 1, as OVERLAP_NNODES=2"),
        (own(endpoint=("::2", 80)), "no secret: whatever reaches [::2]:80 could join the job; "),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_named(environ, message):
    assert refusal(environ).startswith(message)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("n[01-03,7],x", "n01"), ("n[7,9]", "n7"), ("r[2-3]n[10,12]-ib,z", "r2n10-ib")],
)
def test_first_host(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", ",a", "a b", "a[", "a[]", "a]"])
def test_no_host_list(hosts):
    with pytest.raises(UsageError):
        first_host(hosts)


@pytest.mark.parametrize(
    ("host", "answer"),
    [("127.0.0.1", True), ("127.9.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("a", False)],
)
def test_loopback(host, answer):
    assert is_loopback(host) is answer


@pytest.mark.parametrize(("begun", "port"), [(True, 29501), (False, 29500)])
def test_the_next_port_is_taken_where_torch_has_begun_at_that_one(monkeypatch, begun, port):
    distributed = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: begun)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    monkeypatch.setattr("overlap.processes.secret._removed", {})  # where it would stay for later tests
    for name, value in ({"RANK": "1", "WORLD_SIZE": "2"} | MASTER | SECRET).items():
        monkeypatch.setenv(name, value)
    assert find_place().endpoint == ("10.0.0.1", port)


def test_an_mpi_library_that_is_not_the_launchers(monkeypatch):
    library = types.SimpleNamespace(
        COMM_WORLD=types.SimpleNamespace(Get_size=lambda: 1),
        Get_library_version=lambda: "MPICH Version: 4.3.0\nMPICH Release date: today",
    )
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=library))
    place = find_place({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
    assert str(error_of(UsageError, trio.run, introduce_by_mpi, place, 60.0)) == (
        "Open MPI started 4 processes, and the library of mpi4py (MPICH Version: 4.3.0) sees 1: it is not the "
        "launcher's; start with the mpiexec that belongs to it, install an mpi4py that was built for the launcher's "
        "library, or set MASTER_ADDR and MASTER_PORT"
    )


def test_a_process_that_mpi_lets_wait_ends_after_the_time_to_join(tmp_path):
    """As when another process of the job has ended before it started MPI; the call of C keeps the GIL."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    (tmp_path / "mpi4py" / "MPI.py").write_text("import ctypes\nctypes.PyDLL(None).sleep(100)")
    (tmp_path / "program.py").write_text("import overlap\noverlap.run(print)")
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2", "OVERLAP_JOIN_TIMEOUT_S": "0.5"}
    variables["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"
    ended = interpreters.run("program.py", cwd=tmp_path, env=os.environ | variables, timeout=60)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "")
    assert ended.stderr == (
        "overlap: process 0: MPI did not bring 2 processes together within 0.5 s: one has ended, or does not call "
        "overlap.run; look at its output\n"
    )
