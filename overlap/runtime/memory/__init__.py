"""Arrays of a world: where new ones come from, which are in use, and whose memory may be read and written.

* `buffer_pool`: new arrays in memory that has been used before.
* `buffer_locks`: arrays in flight are read-only.
* `lent_arguments`: the arrays among the arguments of a compute.
* `foreign`: arrays behind other types, such as CPU tensors.
"""
