"""Buckets of gradients: how they are divided, packed, reduced and applied."""

# The map, in the order data flows:
#
#   plan        which gradients travel together, and what hooks are given
#   gradients   checks of gradients, and their norm;  agreement: comparison between ranks
#   bucket      Bucket: packs gradients and sends them;  hooked: a hook in place of the collective
#   averaged    buckets of DataParallel;  scattered: buckets of Sharded;  gathering: whole parameters, ahead of use
#   bucketed    models whose gradients leave in buckets
