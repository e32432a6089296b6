"""The state store: saves the state of ranks for a restart; no kill can leave half of a save."""

# The map:
#
#   encoding    a tree of arrays as bytes, and back: pure
#   parts       the files: written whole or not at all
#   store       RankState: what ranks save together, and which of it they all have
