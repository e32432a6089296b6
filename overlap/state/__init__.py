"""The store of saves: states of ranks and checkpoints of models, for a restart; no kill can leave half of a save."""

# The map:
#
#   saves    folders of saves: which are complete, which are removed
#   files    a file of a save: safetensors with a digest, written whole or not at all
#   trees    a tree of arrays as arrays by name and a form, and back: pure
#   store    Store: what ranks save together, and which save they all go on from;  RankState, the store of their trees
#
# `parallel/checkpoints` keeps models in a `Store`, too.
