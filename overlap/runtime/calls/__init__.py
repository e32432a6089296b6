"""Methods of groups and ranks for collectives and messages: each issues an operation and returns its future at once.

`Group` and `Rank` (for its world) have these methods. None of them blocks; `await` the future for the result.
"""

from .collectives import CollectiveCalls
from .exchanges import Exchanges
from .objects import Objects


class GroupCalls(CollectiveCalls, Exchanges, Objects):
    """Every collective and point-to-point operation of a group.

    Properties of all of them:

    * `x` is an array, an object that `numpy.asarray` accepts, or a future of an array. The arrays `x` and `out` are
      read-only and belong to the operation until its future is done. The result belongs to the caller. Only these very
      array objects are locked: data that other views write into their memory before the end may or may not be sent.
    * `x` may also be a tree: a list, tuple or dict of arrays, at any depth, with the same form on all ranks. The tree
      is one operation, whatever its dtypes, and the result has its form. The arrays are copied at the call. Leaves may
      be futures, and `x` may be the future of a tree; ranks may differ in that. `send` takes such trees as well, and
      `recv` returns trees.
    * Objects that export their memory are used without a copy: CPU tensors (bfloat16 and float8 included),
      `array.array`, `bytearray`, DLPack. If `out` is such an object, it is the result. Such objects cannot be locked:
      do not change them before the end. A tensor that is changed while an operation reads it fails the operation.
    * `priority` (lower is more urgent) is added to the priority of the stream. `stream` is the communication stream;
      None: the default stream. `name` appears in the timeline.
    * `timeout_s`: the operation must end within this number of seconds after the call; None: no limit. A late
      operation fails with a `DeadlineError` here and with a `PeerFailedError` on the other ranks. All later operations
      of the same group and stream fail, too, because the state of the other ranks is unknown. A late message fails
      only messages of the same source, destination and tag. The world continues.
    * `call_site`: the line to show in errors and the timeline: a frame, "file.py:41", or the `place` of another future.
      None: the line of the call. Adapters pass the line of their caller.
    * `UsageError` is raised at the call. If `x` is a future, whose array does not exist yet, it is raised at the await.
    * `CollectiveMismatchError` is raised at the await, on every rank, when ranks disagree. `PeerFailedError` and
      `RankLeftError` are raised at the await when another rank cannot take part.
    * `shared=True`, the same on all ranks: the result of `all_reduce`, `all_gather` and `broadcast` is read-only, and
      exists once where ranks share memory: in one process, or in processes of one host alone, which provide up to
      `--shared-memory` each. The memory is used again once every rank has dropped the result and all views of it.
      Where such memory is missing or used up, and on sockets, each rank has a read-only array of its own.
    * `algorithm`, the same on all ranks: the algorithm of the operation, such as "ring"; None: `--algorithm`, or the
      cheapest one. "direct" copies through memory that ranks share. An algorithm that the collective does not have, or
      that does not take this number of ranks, is a `UsageError` with the names of those that do.
    * Objects (`all_gather_object` and its like) travel as msgpack: None, bool, numbers, texts, bytes, numpy arrays, and
      lists, tuples and dicts of these. With `pickle=True`, on all ranks, objects of any class travel as pickles. Then
      any rank can run any code on every other rank. So all ranks must be trusted, as they are if only this job has its
      secret. Each call is one or two operations.
    * dtypes: every number type of numpy and the bfloat16 and float8 types of ml_dtypes, which accumulate in float32.
    """
