"""Checkpoints of models: saved beside training, and resumed on any number of ranks."""

# The map: checkpoints has Checkpoints, whose files are those of `overlap.state`;  pieces: pieces of tensors, and cuts
# of the whole model;  names: their names;  reader: whole tensors out of pieces
