"""Arrays of a world: allocation, locks while they are in use, and arrays in the memory of other objects.

* `buffer_pool`: new arrays in memory that has been used before.
* `buffer_locks`: arrays in flight are read-only, the arguments of computes included.
* `arrays`: arrays that are read-only for good, are in loaned memory, or have no memory.
* `foreign`: arrays in the memory of objects of other types, such as CPU tensors.
"""
