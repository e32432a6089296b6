"""Processes of a world: rendezvous, control messages, and detection of losses."""

# Before a process meets the others:
#
#   place              position of the process, from its environment;  launchers: torchrun, MPI, Slurm;
#                      introduce: the meeting point of an MPI job
#   secret             proof of membership
#   identity           configuration to join
#
# Joining and membership. Members are processes; each may have several ranks.
#
#   join               join(), on all members;  host: on member 0;  thread: the event loop of the connection
#   sockets            endpoints, listening, dialling, meet()
#   member             Membership: exchanges, notices;  inbox: messages that wait;  clock: offset from member 0
#   coordinator        member 0's action on each message
#   messages           all control messages;  link: one connection that carries them;  silence: limits of a silence
#
# A world of several processes:
#
#   life               a world from its start to its end, and its timeline;  traces: one trace file of all processes
#   connect            transport and control plane of a process
#   control_plane      events of ranks;  codec: calls and errors as plain values;  remote_standings: for stall reports
#   status             records of a process for its launcher
