"""Methods of groups and ranks for collectives and messages: each issues an operation and returns its future at once.

`Group` and `Rank` (for its world) have these methods. None of them blocks; `await` the future for the result.
"""

from .collectives import CollectiveCalls
from .exchanges import Exchanges
from .objects import Objects


class GroupCalls(CollectiveCalls, Exchanges, Objects):
    """Every collective and point-to-point operation of a group.

    Properties of all of them:

    * `x` is an array, an object that `numpy.asarray` accepts, or a future of an array. It is read-only and belongs to
      the operation until its future is done; `out` likewise. The result belongs to the caller. Only these very array
      objects are locked: data written through other views of their memory meanwhile may or may not be sent.
    * `x` may also be a tree: a list, tuple or dict of arrays, at any depth, on all ranks alike. It is one operation,
      whatever its dtypes, and the result has the same form. The arrays are copied at the call. Leaves may be futures,
      and `x` may be the future of a tree; ranks may differ in that. `send` takes such trees as well, and `recv` returns
      trees.
    * Objects that export their memory are used without a copy: CPU tensors (bfloat16 and float8 included),
      `array.array`, `bytearray`, DLPack. As `out`, the result is that very object. Such objects cannot be locked: a
      tensor that is changed while an operation reads it makes the operation fail, others are to be left alone
      meanwhile.
    * `priority` (lower is more urgent) is added to that of the stream. `stream` is the communication stream, or None
      for the default one. `name` appears in the timeline.
    * `timeout_s`: the operation must end within so many seconds of the call. Else it fails with a `DeadlineError` here
      and a `PeerFailedError` on the other ranks, and so do all later operations of its group on its stream, for the
      state of the other ranks is unknown; a message ends only messages of its source, destination and tag. The world
      lives on.
    * `call_site`: the line to show in errors and the timeline: a frame, "file.py:41", or the `place` of another future.
      By default the line of the call; adapters pass the line of their caller.
    * `UsageError` is raised at the call; for futures, whose arrays do not exist yet, at the await.
    * `CollectiveMismatchError` is raised at the await, on every rank, when ranks disagree. `PeerFailedError` and
      `RankLeftError` are raised at the await when another rank cannot take part.
    * `shared=True`, the same on all ranks: the result of `all_reduce`, `all_gather` and `broadcast` is read-only, and
      exists once where ranks share memory: in one process, and in processes of one host alone, up to `--shared-memory`
      each. Its memory is used again once every rank has dropped it, with all views of it. Where there is no (more) such
      memory, and on sockets, each rank has a read-only array of its own.
    * `algorithm`, the same on all ranks: the algorithm that carries it, such as "ring"; by default `--algorithm`, or
      the cheapest. "direct" copies through memory that ranks share. A name that the collective does not have, or that
      does not take so many ranks, is a `UsageError` with the names that do.
    * Objects (`all_gather_object` and its like) travel as msgpack: None, bool, numbers, texts, bytes, numpy arrays, and
      lists, tuples and dicts of these. With `pickle=True`, on all ranks, they are pickled: objects of any class, but
      any rank can make every other rank do anything, so all must be trusted, as they are where only this job has its
      secret. Each call is one or two operations.
    * dtypes: every number type of numpy and the bfloat16 and float8 types of ml_dtypes, which accumulate in float32.
    """
