"""Arrays of a world: where new ones come from, which are in use, and whose memory may be read and written.

* `buffer_pool`: new arrays in memory that has been used before.
* `buffer_locks`: arrays in flight are read-only, the arguments of computes included.
* `arrays`: arrays that are read-only for good, lie in borrowed memory, or have none.
* `foreign`: arrays behind other types, such as CPU tensors.
"""
