"""Processes of a world: how they find each other, what they tell each other, and how the loss of one is noticed."""

# The map of this room. What each process knows before it meets the others:
#
#   place           where it stands, as its environment says;  launchers: torchrun, MPI, Slurm
#   secret          what proves membership
#   identity        all that is needed to join;  roll_call: launchers agree on the nodes of the next attempt
#
# Joining and membership. Members are not ranks: a process may host several.
#
#   join            join(): the one way in;  host: the side of member 0;  thread: the event loop of the connection
#   sockets         endpoints, listening, dialling, meet()
#   member          Membership: exchanges, gathers, news;  clock: how far this clock is from that of member 0
#   coordinator     what member 0 does with each message
#   messages        all control messages;  link: one connection that carries them;  silence: how long it may be silent
#
# A world among them:
#
#   life            a world set up, lived, and its timeline kept;  traces: one trace file of all processes
#   connect         from a place to a transport and the control plane
#   control_plane   news between worlds beside the data;  codec: calls and standings as plain values
#   status          what a process tells its launcher
