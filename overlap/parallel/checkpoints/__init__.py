"""Checkpoints of models: saved beside training, and resumed on any number of ranks."""

# The map: checkpoints has Checkpoints;  pieces: pieces of tensors, and cuts of the whole model;  names: their names;
# files: folders, files and checksums on the disk
