#!/bin/sh
# Two hosts on one machine: network namespaces, joined by a link of 1 Gbit/s. What two machines would do, command by
# command; needs root, and `ip` and `tc` of iproute2. Whatever happens, also Ctrl-C, the namespaces are removed.
#
# You will see the lines of 05_many_processes.py, two from each host. `python -m tests.benchmarks two_hosts` measures
# on such hosts.
set -eu

one=overlap-one-$$
two=overlap-two-$$
address=10.78.0
program=$(dirname "$0")/05_many_processes.py

started=
remove() {
    for process in $started; do
        kill "$process" 2>/dev/null || true
    done
    wait
    ip netns delete "$one" 2>/dev/null || true
    ip netns delete "$two" 2>/dev/null || true
}
trap remove EXIT
trap 'exit 130' INT TERM HUP

ip netns add "$one"
ip netns add "$two"
ip -n "$one" link add fast type veth peer name fast netns "$two"
for host in "$one 1" "$two 2"; do
    set -- $host
    ip -n "$1" address add "$address.$2/24" dev fast
    ip -n "$1" link set lo up
    ip -n "$1" link set fast up
    tc -n "$1" qdisc add dev fast root tbf rate 1gbit burst 256kb latency 100ms
done

# On real machines, copy the secret to each of them.
OVERLAP_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export OVERLAP_SECRET

start() { # on this host, this node
    exec ip netns exec "$1" "${PYTHON:-python3}" -m overlap run --nnodes 2 --ranks-per-process 2 --no-prefix \
        --node-rank "$2" --rdzv-endpoint "$address.1:29500" "$program"
}
start "$one" 0 &
started="$started $!"
start "$two" 1 &
started="$started $!"
for process in $started; do
    wait "$process"
done
