"""Command lines that are refused before anything runs, each with its message; options that all commands share."""

import argparse
import shlex
from collections import defaultdict
from importlib import import_module

import pytest

from overlap.cli import COMMANDS
from overlap.cli.bench import measuring
from overlap.cli.parser import Parser

# -- command lines that are refused before anything runs, each with its message: one line on stderr, exit code 2 -------

BARRIER = """
import overlap

async def main(rank):
    await rank.barrier()

overlap.run(main)
"""
FILES = {
    "x.py": "print('ran')",
    "broken.py": "x = 1\nprint(",
    "sub/x.py": "",
    "hollow_package/__init__.py": "",
    "train.py": BARRIER,
    "work.py": f"1 / 0\n{BARRIER}",
}
# A line of a shell, and how the message begins; "..." is any beginning, and "$" the end. LONG is a name too
# long, DIGITS a number that no float holds.
TABLE = r"""
$ overlap runn
'runn' is not a command (did you mean run?); KNOWN
$ overlap xyz
'xyz' is not a command; KNOWN
$ overlap run --nnodes 0 x.py
run: argument --nnodes: expected a positive integer, got '0'
$ overlap run --engine dask x.py
run: argument --engine: expected ray, got 'dask'
$ overlap run --node-rank 0 x.py
--node-rank: --nnodes and --rdzv-endpoint must be given too, the same for all hosts
$ overlap run --nnodes 2 --rdzv-endpoint a:1 --node-rank 2 x.py
--node-rank: expected less than --nnodes 2, got 2
$ overlap run --nnodes 2 --rdzv-endpoint a:1 --node-rank 1 x.py
--node-rank: anybody who reaches a:1 could join the job; give
$ overlap run --nnodes 2 --rdzv-endpoint a:0 --node-rank 1 x.py
--rdzv-endpoint: the hosts that are started elsewhere must
$ overlap run --processes 2 --rdzv-endpoint a x.py
--rdzv-endpoint: expected HOST:PORT
$ overlap run --nnodes 2 x.py
--nnodes 2: each host starts its own processes, by this command with --node-rank I and --rdzv-endpoint HOST:PORT too;
$ overlap run --processes 2 --ranks=4 --ranks-per-process=4 x.py
--ranks 4: 2 processes with --ranks-per-process 4 have 8; leave one out$
$ overlap run --nnodes 2 --rdzv-endpoint 127.0.0.1:1 --node-rank 0 --processes 2 --ranks 6 x.py
6 ranks cannot be divided among --nnodes 2 with --processes 2;
$ overlap run --nnodes 2 --rdzv-endpoint 127.0.0.1:1 --node-rank 0 --processes 2 --max-restarts 1 x.py
--processes: --max-restarts on several hosts needs one process on each; leave one out$
$ overlap run --processes 3 --cluster 'trn2.48xlarge x4' x.py
256 ranks cannot be divided among --processes 3;
$ overlap run --processes 3 --ranks 4 x.py
4 ranks cannot be divided among --processes 3;
$ overlap run --processes 2 --job-id LONG x.py
--job-id: expected at most 64 printable characters, got 'xxx
$ overlap run --processes 2 --log-dir x.py x.py
--log-dir: x.py: File exists
$ overlap run --processes 2 --rails eth0, x.py
run: argument --rails: expected a positive number, or
$ overlap run --tls-cert x.py x.py
TLS needs three files: --tls-cert, --tls-key, --tls-ca; given: --tls-cert x.py; missing: --tls-key, --tls-ca$
$ overlap run --tls-cert x.py --tls-key none --tls-ca x.py x.py
--tls-key: none: there is no such
$ overlap run --processes 2 --transport mpi x.py
...--transport: 'mpi' is an unknown transport; known are auto, efa, neuronlink, shared_memory, sockets
$ overlap run
run: name a SCRIPT, or -m MODULE (`overlap run --help` explains)
$ overlap run none.py
run: none.py: No such file or directory
$ overlap run sub
run: sub: Is a directory
$ overlap run broken.py
run: broken.py:2: not Python: '(' was never closed; correct it
$ overlap run -m
run: -m needs a MODULE
$ overlap run -m no_such_module_x
run: -m no_such_module_x: there is no such module to run; install it, or correct the name
$ overlap run -m hollow_package
run: -m hollow_package: there is no such module to run; install it, or correct the name
$ overlap run -m no_such_module_x.y
run: -m no_such_module_x.y: No module named 'no_such_module_x'
$ overlap run --ranks 0 x.py
run: argument --ranks: expected a positive integer, got '0' (`overlap run --help`
$ overlap run --timeout -1 x.py
run: argument --timeout: expected a positive number of seconds, got '-1'
$ overlap run --cluster nosuch x.py
--cluster: unknown cluster 'nosuch'; known:
$ overlap run --algorithm nosuch x.py
algorithm: 'nosuch' is unknown; known are direct
$ overlap run --trace sub x.py
--trace: sub is a directory; name a file in it
$ overlap run --trace /nowhere/a.json x.py
--trace: there is no folder /nowhere; make it
$ overlap run --nnode=2 x.py
...; did you mean --nnodes? (
$ overlap run --checksum x.py
...; did you mean --checksums? (
$ overlap run -np 4 x.py
...; did you mean --processes or --ranks? (
$ overlap run --master_port=29500 x.py
...; --rdzv-endpoint HOST:PORT is both, and a run on one host needs none (
$ overlap run --stall 5 x.py
...; did you mean --stall-warning? (
$ overlap run --standalone x.py
...--standalone; leave it out: a run on one host needs no rendezvous (
$ overlap run --trace '' x.py
--trace: expected the name of a file, got ''$
$ overlap run --cluster nix x.py
--cluster: unknown cluster 'nix';
$ overlap run --rank 3 x.py
run: unrecognized arguments:
$ overlap simulate --world-size=4 x.py
...; did you mean --ranks? (
$ overlap simulate --cluster trn9 train.py
...trn9
$ overlap simulate --cluster trn1.32xlarge --ranks 33 train.py
...33 ranks do not fit: trn1.32xlarge x1 holds 32
$ overlap simulate --cluster trn2.48xlarge --lnc 3 train.py
...trn2.48xlarge: lnc: expected 2 or 1, found 3
$ overlap simulate --cluster 'trn2.48xlarge x2' --nodes 3 train.py
...nodes: the cluster's name says 2, the argument 3; give it once
$ overlap simulate --cluster trn1.32xlarge --ranks 8 --efficiency 1.5 train.py
...efficiency: expected more than 0, at most 1, got 1.5
$ overlap simulate --cluster trn1.32xlarge --ranks 8 --dtype int4 train.py
...dtype: no peak is known for 'int4' on Trainium1
$ overlap simulate --profile gone.json train.py
...unrecognized arguments: --profile
$ overlap run --no-unix --peer-direct train.py
...unrecognized arguments: --no-unix
$ overlap simulate --jitter -1 train.py
...jitter: expected 0 or more, got -1.0
$ overlap simulate --algorithm magic train.py
...magic
$ overlap simulate --seed x train.py
...expected an integer, got 'x'
$ overlap simulate --json-file found.json train.py
...unrecognized arguments: --json-file (
$ overlap simulate --sweep train.py
...unrecognized arguments: --sweep (
$ overlap simulate --trace . train.py
...--trace: . is a directory; name a file in it
$ overlap simulate --width 39 train.py
...--width: 39 is too narrow; at least 40 columns are needed
$ overlap simulate run.json
simulate: run.json: a recorded run is no program; name the program itself$
$ overlap bench allr -b 8 --tcp
bench: unrecognized arguments: --tcp
$ overlap bench allr -b 8 --processes 2 --rails 2
bench: unrecognized arguments: --rails 2 (`
$ overlap bench allr -b 8 --no-peer-direct
bench: unrecognized arguments: --no-peer-direct
$ overlap bench allr -b 8 --checksums
bench: unrecognized arguments: --checksums
$ overlap bench allr -b 8 --transport efa
bench: unrecognized arguments: --transport efa
$ overlap bench allr -b 8 --vs=gloo
bench: unrecognized arguments: --vs=gloo
$ overlap bench allr -b 8 -c 1
bench: unrecognized arguments: -c 1
$ overlap bench allr -b 8 --ranks 2,x
bench: argument --ranks: expected a positive integer, got 'x'
$ overlap bench allr -b 8 -n 0
bench: argument -n/--iters: expected a positive integer, got '0'
$ overlap bench allr -b 8 -w=-1
bench: argument -w/--warmup_iters: expected an integer of 0 or more, got '-1'
$ overlap bench allr -b 8 --processes 2 --ranks 4,3
--ranks: expected 1 or more, in multiples of --processes 2, got 3
$ overlap bench
bench: the following arguments are required: OP
$ overlap bench two_hosts
bench: argument OP: invalid choice: 'two_hosts' (choose from 'all_reduce', 'allr', 'reduce_scatter', 'redsct',
$ overlap bench barrier
bench: argument OP: invalid choice: 'barrier'
$ overlap bench allr -b 4000000T
--maxbytes: inputs and results on 2 ranks need 1.6e+07 TiB, this machine has
$ overlap bench allr -b 8 -n 99999999999999999999
--iters: expected at most 1000000, got 99999999999999999999$
$ overlap bench allr -b 8 -w 99999999999999999999
--warmup_iters: expected at most 1000000, got 99999999999999999999$
$ overlap bench allr -b DIGITS
--minbytes: '9999
$ overlap plan 1f1b --ranks 99999999999999999999
--ranks, --microbatches, --chunks: expected ranks * (ranks + microbatches) * chunks up to 1048576, got 100000000
$ overlap plan 1f1b --microbatches 99999999999999999999
--ranks, --microbatches, --chunks: expected ranks * (ranks + microbatches) * chunks up to 1048576, got 400000000
$ overlap plan interleaved-1f1b --chunks 99999999999999999999
--ranks, --microbatches, --chunks: expected ranks * (ranks + microbatches) * chunks up to 1048576, got 4799999
$ overlap plan all_reduce --cluster trn1.32xlarge --bytes DIGITS
--bytes: '9999
$ overlap plan 1f1b --bytes 1M
--bytes: only of a collective; 1f1b is a schedule; leave it out$
$ overlap plan all_reduce
--bytes: is missing; pass the size of the data, such as --bytes 64MB$
$ overlap plan nosuch
SUBJECT: 'nosuch' is no file, no collective (all_reduce,
$ overlap plan all_reduc
SUBJECT: 'all_reduc' (did you mean all_reduce?) is no file, no collective (all_reduce,
$ overlap plan trn2.48xlarge
SUBJECT: 'trn2.48xlarge' is no file,
$ overlap topology trn2.48xlarg
...unknown cluster 'trn2.48xlarg'; did you mean 'trn2.48xlarge'? known: dl1
$ overlap model llama-8b --tp 8
`overlap model` is gone: simulate the program itself, with `overlap simulate`$
$ overlap replay run.json
`overlap replay` is gone: simulate the program itself, with `overlap simulate`$
$ overlap calibrate --here
`overlap calibrate` is gone: write the machine file by hand, as docs/machines.md shows$
$ overlap simulate --sweep nodes=1,2 x.py
simulate: unrecognized arguments: --sweep
$ overlap simulate --mtbf 3h x.py
simulate: unrecognized arguments: --mtbf
$ overlap simulate --straggler-share 0.5 x.py
simulate: unrecognized arguments: --straggler-share
$ overlap plan all_reduce --cluster trn1.32xlarge --bytes 3
--bytes: 3 bytes are not whole elements of float32, of 4 bytes; choose a multiple of that
$ overlap plan all_reduce --cluster trn1.32xlarge --bytes 4 --top -1
plan: argument --top: expected an integer of 0 or more, got '-1'
$ overlap timeline none.json
none.json: cannot be read
$ overlap test none.py --ranks 0
test: argument --ranks: expected a positive integer, got '0'
$ overlap test none.py --color red
...; if they are the program's, end the line with -- --color red (`overlap test --help`
$ overlap test none.py skip --ranks 2 -- now
test: unrecognized arguments: skip; if they are the program's, end the line with -- skip now (`
$ overlap test none.py --faults flood
faults: 'flood' is unknown; known are die
$ overlap doctor --jsn
...; did you mean --json? (
"""
LINES = TABLE.strip().splitlines()
ROWS = dict(zip(LINES[::2], LINES[1::2], strict=True))


@pytest.mark.everyday(40)
@pytest.mark.parametrize("line", ROWS)
def test_a_command_line_is_refused(overlap, script, monkeypatch, line):
    for name, text in FILES.items():
        script(text, name)
    monkeypatch.setattr(measuring, "measure_case", None)
    _, _, *words = shlex.split(line.replace("LONG", "x" * 65).replace("DIGITS", "9" * 400))
    code, out, err = overlap(*words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    message = ROWS[line].replace("KNOWN", f"known are {', '.join(COMMANDS)}")
    begin, end = ("", message[3:]) if message.startswith("...") else (f"overlap: {message}", "")
    whole = (end or begin).endswith("$")
    assert err.startswith(begin.removesuffix("$") + "\n" * (whole and not end))
    assert end.removesuffix("$") in err


# -- options of all commands: each name has one meaning and one spelling -----------------------------------------------


def parser_of(command):
    parser = Parser(f"overlap {command}")
    import_module(f"overlap.cli.{command}").add_arguments(parser)
    return parser


def meanings():
    """For each option, its metavar and the meaning in its help, by command; remarks follow a semicolon."""
    found = defaultdict(dict)
    for command in COMMANDS:
        for action in parser_of(command)._actions:
            for option in action.option_strings:
                if option.startswith("--") and action.help != argparse.SUPPRESS:
                    found[option][command] = (action.metavar, action.nargs, action.help.partition(";")[0])
    return found


SHARED = {option: by_command for option, by_command in meanings().items() if len(by_command) > 1}


@pytest.mark.parametrize("option", SHARED)
def test_an_option_means_the_same_in_all_commands(option):
    assert len(set(SHARED[option].values())) == 1, SHARED[option]


def test_options_with_several_meanings_in_other_programs_are_shared_here():
    assert {"--ranks", "--json", "--trace", "--cluster", "--processes", "--step"} <= SHARED.keys()
    everywhere = meanings()
    assert everywhere["--check"].keys() == {"run"}
    assert everywhere["--faults"].keys() == {"test"}
    assert everywhere["--steps"].keys() == {"demo"}
    assert not {"--against", "--best", "--nproc-per-node"} & everywhere.keys()


@pytest.mark.parametrize("argv", [
    ["timeline", "run.json", "--against", "b.json"],
    ["why", "--against", "b.json"],
    ["run", "--stall_warning", "5", "train.py"],
    ["run", "--nproc-per-node", "2", "train.py"],
    ["plan", "all_reduce", "--check", "0-7"],
    ["simulate", "--json=a.json", "train.py"],
], ids=" ".join)  # fmt: skip
def test_a_second_spelling_is_refused(overlap, argv):
    code, out, err = overlap(*argv)
    assert (code, out) == (2, "")
    assert "unrecognized arguments: --" in err or "ignored explicit argument" in err


def test_ranks_of_a_group_are_refused_with_the_option_that_names_them(overlap):
    told = "overlap: --ranks: is for schedules only; for a collective pass --group 0-3\n"
    words = ("plan", "all_reduce", "--bytes", "8", "--cluster", "local")
    assert overlap(*words, "--ranks", "0-3") == (2, "", told)
    assert overlap(*words, "--ranks", "4") == (2, "", told)
