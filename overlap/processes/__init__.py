"""Processes of a world: rendezvous, control messages, and detection of losses."""

# Before a process meets the others:
#
#   place              position of the process, from its environment;  launchers: torchrun, MPI, Slurm;
#                      introduce: the meeting point of an MPI job
#   secret             proof of membership
#   identity           configuration to join, limits of silence
#
# Joining and membership. Members are processes; each may have several ranks.
#
#   members            three pure machines: what member 0, its clients and the program of each member do on a stimulus
#   host               member 0 to the others;  join: join() and Membership, on all members
#   link               one connection;  wire: all that it carries;  clock: offset from member 0
#   sockets            endpoints, listening, dialling, dial_and_greet()
#
# A world of several processes:
#
#   real_time          a world: its setup, and the run of its ranks
#   trace_writer       the trace of a run;  traces: the file of a process, and one file of all
#   connect            transport and control plane of a process
#   control            events of ranks, and views of the ranks of others
#   status             records of a process for its launcher
