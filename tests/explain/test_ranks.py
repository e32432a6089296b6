"""Several ranks: the late one, what it did, clocks, and what one rank alone can show."""

import pytest

import overlap
from overlap.errors import UsageError
from overlap.explain.entry import explain_files
from overlap.timeline.files import children
from tests.explain.profiles import Recording


def write(tmp_path, recordings):
    for number, rec in enumerate(recordings):
        rec.write(tmp_path / f"rank{number}.json")
    return overlap.why(tmp_path)


def two_ranks(*, ahead=0):
    """Three steps; rank 1 loads data for 3,000 us before each all-reduce, which takes 500 us once both are there."""
    recordings = [Recording(rank=rank, world=2, host=f"node{rank if ahead else ''}") for rank in range(2)]
    for rank, rec in enumerate(recordings):
        shift = ahead * rank
        for number in range(3):
            start = 1_000 + number * 10_000 + shift
            rec.step(number, start, start + 10_000)
            rec.kernel(start, start + 5_000)
            arrives = start + 5_000 + 3_000 * rank
            if rank:
                rec.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start + 100, arrives - 10)
                rec.frame("data.py(9): decode", start + 101, arrives - 11)
                rec.op("aten::mm", arrives - 10, arrives)
            rec.collective(arrives, start + 8_500, launch=arrives - 5)
            rec.kernel(start + 8_500, start + 10_000, launch=arrives)
    return recordings


def by_rank(found, step):
    return {
        rank: {cause: ns / 1000 for each, at, cause, ns in found.costs if (each, at) == (rank, step)}
        for rank in found.ranks
    }


def test_waiting_is_charged_to_the_late_rank_and_what_it_did(tmp_path):
    found = write(tmp_path, two_ranks())
    assert by_rank(found, 1) == {
        0: {"compute": 6_500, "waiting": 3_000, "wire": 500},
        1: {"compute": 6_500, "wire": 500, "data": 2_990, "launch": 10},
    }
    waiting = next(cause for cause in found.causes if cause.cause == "waiting")
    assert waiting.places[0].startswith("rank 1 (the data loader at data.py:9 (def decode))")
    assert "clocks: one host, one clock" in found.notes
    assert found.verdict == (
        "step 10.0 ms: compute 6.5, exposed 2.0 (20%): 1.5 waiting for rank 1 (the data loader at data.py:9 (def "
        "decode)), 0.5 on the wire (all_reduce); 1.5 (15%) the data loader (data.py:9 (def decode)); try: take that "
        "work from rank 1, or divide it among the ranks, -1.5 ms if the rest stays, at most -2 ms"
    )


def test_a_profile_of_a_job_with_our_backend_is_a_profile(tmp_path):
    recordings = two_ranks()
    for rec in recordings:
        rec.header["distributedInfo"] |= {"backend": "overlap"}
    assert write(tmp_path, recordings).origin == "PyTorch profiler"


def test_clocks_of_two_hosts_are_aligned_on_the_ends_of_collectives(tmp_path):
    found = write(tmp_path, two_ranks(ahead=777_777))
    assert by_rank(found, 1)[0] == {"compute": 6_500, "waiting": 3_000, "wire": 500}
    assert any("2 hosts" in note and "within 0 ns" in note for note in found.notes)


def test_bases_of_two_clocks_count(tmp_path):
    recordings = two_ranks()
    recordings[1].header["baseTimeNanoseconds"] = 5_000_000
    for event in recordings[1].events:
        event["ts"] -= 5_000
    assert by_rank(write(tmp_path, recordings), 1)[0]["waiting"] == 3_000


def test_one_rank_of_two_cannot_divide_waiting_and_wire(tmp_path):
    found = write(tmp_path, two_ranks()[:1])
    assert by_rank(found, 1)[0] == {"compute": 6_500, "communication": 3_500}
    assert "wait or wire cannot be told: rank 1 not recorded" in found.verdict
    assert not any(word in found.verdict for word in ("on the wire", "waiting for"))


def test_a_small_message_that_takes_longer_than_a_large_one_has_waited(tmp_path):
    rec = Recording(world=2)
    rec.kernel(0, 1_000, launch=-5)
    rec.collective(1_000, 4_300, count=2_000, launch=1)
    rec.collective(4_300, 6_700, count=8_000, launch=2)
    found = write(tmp_path, [rec])
    assert found.traffic[0]["waits_at_least_ns"] == 900_000
    assert any("at least 900 us are waiting" in each for each in found.undecided)


def test_a_message_of_a_tenth_that_takes_as_long_has_waited(tmp_path):
    """The shortest call takes 20 us; 2 MB take at most these, and twice a tenth of the 1,000 us of 20 MB."""
    rec = Recording(world=2)
    rec.kernel(0, 1_000, launch=-5)
    rec.collective(1_000, 2_000, count=500_000, launch=1)
    rec.collective(2_000, 3_000, count=5_000_000, launch=2)
    rec.collective(3_000, 3_020, count=10, launch=3)
    assert write(tmp_path, [rec]).traffic[0]["waits_at_least_ns"] == 1_000_000 - 220_000


def test_bandwidth_is_that_of_the_fastest_large_call(tmp_path):
    rec = Recording(world=4)
    rec.kernel(0, 1_000, launch=-5)
    rec.collective(1_000, 2_000, count=250_000_000, size=4, launch=1)  # 1 GB in 1 ms
    found = write(tmp_path, [rec])
    assert (found.traffic[0]["algorithm_gb_s"], found.traffic[0]["bus_gb_s"]) == (1_000, 1_500)


def test_a_rank_whose_recording_begins_later_is_not_blamed(tmp_path):
    """Both have one recorded step; rank 1 begins to record 4 ms later, and begins that step then."""
    recordings = [Recording(rank=rank, world=2) for rank in range(2)]
    for rank, rec in enumerate(recordings):
        start = 4_000 * rank
        rec.op("aten::mm", start, start + 20)
        rec.kernel(start + 10, start + 500, launch=start + 5)
        rec.collective(start + 500, 5_000, launch=start + 8)
    found = write(tmp_path, recordings)
    waiting = next(cause for cause in found.causes if cause.cause == "waiting")
    assert "rank 1 (not yet recorded (its recording begins 4 ms after the first))" in waiting.places[0]
    assert any(item.change.startswith("record three steps or more") for item in found.advice)


def test_ranks_that_are_late_in_turn_are_not_blamed(tmp_path):
    recordings = [Recording(rank=rank, world=3) for rank in range(3)]
    for rank, rec in enumerate(recordings):
        for number in range(3):
            start = 1_000 + 10_000 * number
            rec.step(number, start, start + 10_000)
            arrives = start + (8_000 if rank == number else 5_000)
            rec.kernel(start, arrives)
            rec.collective(arrives, start + 10_000, launch=start - 3, size=3)
    (item,) = [item for item in write(tmp_path, recordings).advice if item.cause == "waiting"]
    assert item.change.endswith("other programs: rank 1 is the last, for this reason, in 1 of 3 steps")


def test_collectives_without_a_group_are_not_matched_if_the_job_has_several(tmp_path):
    """gloo does not name groups: the n-th call of a rank may be of another group than that of the next rank."""
    recordings = [Recording(rank=rank, world=4, device="") for rank in range(4)]
    for rank, rec in enumerate(recordings):
        rec.header["distributedInfo"]["pg_config"] = [{"pg_name": "0", "pg_size": 4}, {"pg_name": "1", "pg_size": 2}]
        rec.op("aten::mm", 0, 1_000)
        rec.add("user_annotation", "gloo:all_reduce", 1_000 + 100 * (rank // 2), 2_000, tid=5)
    found = write(tmp_path, recordings)
    assert {cause.cause for cause in found.causes} >= {"communication"}
    assert any("do not name their group" in note for note in found.notes)


def test_clocks_that_do_not_fit_divide_nothing(tmp_path):
    recordings = two_ranks()
    for event in recordings[1].events:
        event["ts"] += 50_000  # one host, and yet other times: two runs
    found = write(tmp_path, recordings)
    assert "waiting" not in {cause.cause for cause in found.causes}
    assert any("two runs" in note for note in found.notes)
    assert "wait or wire cannot be told: the clocks of the files do not fit, or they are of two runs" in found.verdict


def test_two_files_of_one_rank_are_refused(tmp_path):
    with pytest.raises(UsageError, match="both of rank 0"):
        write(tmp_path, [two_ranks()[0], two_ranks()[0]])


def test_files_of_worlds_of_two_sizes_are_refused_by_their_names(tmp_path):
    other = Recording(rank=1, world=4)
    other.kernel(0, 100, launch=-5)
    told = r"of different runs: \S+ of a world of 2 ranks, \S+ of a world of 4 ranks; name the files of one run"
    with pytest.raises(UsageError, match=told):
        write(tmp_path, [two_ranks()[0], other])


@pytest.mark.parametrize(
    "name",
    ["ncclDevKernel_AllReduce_Sum_f32_RING_LL()", "ncclSymkDevKernel_AllReduce", "multimem_all_reduce_kernel<bf16>",
     "two_shot_all_reduce_kernel", "void rcclGenericKernel()", "void vllm::cross_device_reduce_1stage<bf16, 8>",
     "void deep_ep::intranode::dispatch<8>"],
)  # fmt: skip
def test_kernels_of_communication_libraries_are_no_compute(tmp_path, name):
    rec = Recording()
    rec.kernel(0, 100, launch=-5)
    rec.kernel(100, 200, launch=-4, name=name)
    assert by_rank(write(tmp_path, [rec]), None)[0] == {"compute": 100, "communication": 100}


@pytest.mark.parametrize(("host", "op"), [("c10d::send", "send_recv"), ("c10d::alltoall_base_", "all_to_all")])
def test_kernels_of_messages_are_all_to_alls_only_where_the_host_calls_these(tmp_path, host, op):
    rec = Recording(world=2)
    rec.op(host, -5, 0)
    rec.kernel(0, 100, launch=-4, name="ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")
    assert write(tmp_path, [rec]).traffic[0]["op"] == op


def test_a_kernel_without_an_operator_has_its_own_name_as_place(tmp_path):
    rec = Recording()
    rec.kernel(0, 100, launch=-3, name="void at::native::(anonymous namespace)::softmax<float>(float*)")
    assert write(tmp_path, [rec]).causes[0].places == ("at::native::softmax (100 us)",)


def test_copies_between_devices_are_communication(tmp_path):
    rec = Recording()
    rec.kernel(0, 100, launch=-5)
    rec.copy(100, 200, launch=-4, kind="Memcpy PtoP (Device -> Device)")
    assert by_rank(write(tmp_path, [rec]), None)[0] == {"compute": 100, "communication": 100}


def test_files_without_a_rank_have_that_of_their_name(tmp_path):
    recordings = two_ranks()
    for rec in recordings:
        del rec.header["distributedInfo"]
    assert by_rank(write(tmp_path, recordings), 1)[0] == {"compute": 6_500, "waiting": 3_000, "wire": 500}


@pytest.mark.slow
def test_processes_measure_large_files_alike(tmp_path, monkeypatch):
    found = write(tmp_path, two_ranks())
    monkeypatch.setattr(children, "SMALL_BYTES", 0)
    done = []
    assert explain_files([tmp_path], progress=lambda *counts: done.append(counts)) == found
    assert done == [(0, 2), (1, 2)]
    (tmp_path / "rank1.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
    with pytest.raises(UsageError, match="no event of PyTorch's profiler"):
        explain_files([tmp_path])


def test_collectives_in_parallel_are_exposed_once(tmp_path):
    rec = Recording(device="", world=2)
    rec.op("aten::mm", 0, 100)
    for thread in (5, 6):  # gloo has two threads
        rec.add("user_annotation", "gloo:all_reduce", 100, 900, tid=thread)
    found = write(tmp_path, [rec])
    assert by_rank(found, None)[0] == {"compute": 100, "communication": 800}
    assert (found.traffic[0]["calls"], found.traffic[0]["exposed_ns"]) == (2, 800_000)


def test_hidden_communication_costs_nothing(tmp_path):
    rec = Recording(world=2)
    rec.kernel(0, 1_000, launch=-5)
    rec.collective(100, 900, launch=-4)
    assert by_rank(write(tmp_path, [rec]), None)[0] == {"compute": 1_000}
