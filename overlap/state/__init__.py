"""The state store: what a rank must find again after a restart, kept so that no kill can leave half of it."""

# The map of this room:
#
#   encoding    a tree of arrays as bytes, and back: pure
#   parts       the files: written whole or not at all
#   store       RankState: what ranks save together, and which of it they all have
