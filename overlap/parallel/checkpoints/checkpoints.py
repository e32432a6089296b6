"""Checkpoints of models: written beside training, complete or not there, resumed on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import trio

from ...errors import UsageError
from ...notice import notify
from ...runtime.group import Group
from ...runtime.memory.arrays import metadata
from ...runtime.rank import Rank
from ...state.files import CODES, OWN, About, SavedFile
from ...state.saves import CHECKPOINTS, Saves
from ...state.trees import pack_tree, unpack_tree
from ...timeline.recording import call_site
from ...timeline.span import RoleName
from ..memory_work import users_site
from ..settings import check_count, check_is_rank, resolve_group
from .names import Naming, describe_difference
from .pieces import Cut, Shard, Tensors
from .reader import Reader, merge

if TYPE_CHECKING:
    from ..tree import Site

_STREAM = "overlap.checkpoints"

T = TypeVar("T")


class Checkpointed(Protocol):
    """A model that can be saved, as all strategies here can."""

    steps: int  # How many it has made

    def tensors(self) -> Tensors:
        """Return dtype and shape of all that all ranks have together, by name."""

    def kept(self) -> Sequence[Shard]:
        """Return the pieces that this rank saves: each element is one rank's."""

    def wanted(self) -> Sequence[Shard]:
        """Return the pieces that this rank needs to go on, in the model's own memory."""

    def notes(self) -> Mapping[str, object]:
        """Return other values that all ranks of the model have alike, as JSON can tell them."""

    def own(self) -> Mapping[str, object]:
        """Return what this rank alone has: a tree, as `rank.state` keeps it."""

    async def wait_updates(self) -> None:
        """Wait until all updates that have been issued are done."""

    def resume(self, steps: int, notes: Mapping[str, object], own: Mapping[str, object] | None) -> str:
        """Go on from that step, once the pieces of `wanted` have been written.

        Args:
            steps: Number of steps before the checkpoint.
            notes: The result of `notes` when it was saved.
            own: The result of `own` on this rank, to be kept; None if other ranks saved it.

        Returns:
            The difference to the saved model, for people to read; empty if there is none.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The checkpoint that a model goes on from."""

    step: int  # How many steps it had made
    ranks: int  # Number of ranks that saved it
    exact: bool  # Whether training goes on with the bits that it would have had without the break
    why: str = ""  # The reason, if not
    extra: Mapping[str, object] = field(default_factory=dict)  # Values that were saved with it


class Checkpoints:
    """The checkpoints of one model, as one rank uses them.

    Every rank makes one, with the same arguments, and all calls are collective::

        checkpoints = parallel.Checkpoints(rank, "runs/a")
        await checkpoints.restore(model)
        for step in range(model.steps, 1000):
            ...
            if step % 50 == 49:
                await checkpoints.save(model)
        await checkpoints.finish()

    Under `overlap run --max-restarts`, a world goes on from the last complete one; without a folder of their own,
    checkpoints are in the one of `--state-dir`, where the launcher looks for them.

    Args:
        rank: This rank.
        folder: Folder that all ranks see; by default the one of `--state-dir`.
        group: The ranks that have the model, with all its parts; by default all.
        cuts: Where this rank's weights lie in the whole model, by the model's names of them; others are whole,
            under their own names. A checkpoint has all blocks, or is not there. Ranks that share a model otherwise,
            with more or fewer of them for matrices and stages, go on from it. `ColumnLinear.cuts` and
            `RowLinear.cuts` tell the cuts of a layer.
        whole: Whether a checkpoint is one file, `model.safetensors`, in which each weight has its name and shape;
            it goes through the first rank's memory. Otherwise each rank's share is a file.
        keep: Number of complete checkpoints to keep.

    Raises:
        UsageError: If no folder is known, `keep` is no number from 1, or `cuts` has something else.
    """

    def __init__(
        self,
        rank: Rank,
        folder: str | os.PathLike[str] | None = None,
        *,
        group: Group | None = None,
        cuts: Mapping[str, Cut] | None = None,
        whole: bool = False,
        keep: int = 2,
    ) -> None:
        check_is_rank(rank)
        check_count("keep", keep)
        if folder is not None and not isinstance(folder, (str, os.PathLike)):
            raise UsageError(f"folder: expected a path, got {folder!r}")
        path = folder if folder is not None else rank.state.folder
        if path is None and rank.state.real:
            raise UsageError("folder: no folder for checkpoints is known; pass one, or give --state-dir DIR")
        self._rank, self._group, self._whole = rank, resolve_group(rank, group), whole
        self._naming = Naming(cuts)
        self._part = "" if cuts is None else f"rank {self._group.rank} {self._naming.digest}"
        self._stream = rank.stream(_STREAM)
        self._store = rank.state.open_store(Saves(path, CHECKPOINTS), self._group, self._stream, keep=keep)

    async def save(self, model: Checkpointed, extra: Mapping[str, object] | None = None) -> None:
        """Save a model as it is after its last step; goes on as soon as there is a copy, which is written meanwhile.

        Time is taken by waiting for the updates under way, a copy of this rank's share, and, if it is not done, for the
        checkpoint before. A rank that cannot write ends the world, and the checkpoint never appears.

        In virtual time nothing is written.

        Args:
            model: To be saved.
            extra: Other values that are needed to go on, such as the place in the data, for JSON; the first rank's
                counts.

        Raises:
            UsageError: If it is no model, or safetensors has no type for a dtype of it.
        """
        site = users_site()
        _check_savable(model)
        if unknown := sorted({dtype for dtype, _ in model.tensors().values()} - CODES.keys()):
            raise UsageError(f"model: safetensors has no type for {', '.join(unknown)}; convert them first")
        self._naming.check_cuts(model.tensors())
        await self.finish()
        await model.wait_updates()
        pieces = {piece.name: piece for piece in map(self._naming.rename_piece, model.kept())}
        own, form = pack_tree(model.own(), CODES, f"{OWN}{self._group.rank}:")
        arrays = {name: piece.data for name, piece in pieces.items()} | own
        copies = await self._rank.compute(
            lambda: {name: array.copy() for name, array in arrays.items()},
            name=RoleName("copy for a checkpoint", "library"),
            bytes_moved=2 * sum(array.nbytes for array in arrays.values()),
        )
        write = partial(
            self._store.save, model.steps, copies, name="checkpoint", site=site, saved_at=call_site(*site),
            merge=merge if self._whole else None,
            pieces={name: piece.stored for name, piece in pieces.items()}, form={str(self._group.rank): form},
            notes={self._part: dict(model.notes())}, extra=dict(extra or {}),
        )  # fmt: skip
        self._rank.state.writing[self._group.ranks] = self._rank.spawn(
            write, name=f"checkpoint of step {model.steps}", errors="await", call_site=site
        )

    async def finish(self) -> None:
        """Wait until the checkpoint under way is complete, on the disk.

        Raises:
            OSError: If it could not be written.
        """
        writing = self._rank.state.writing.pop(self._group.ranks, None)
        if writing is not None:
            await writing

    async def restore(self, model: Checkpointed) -> Restored | None:
        """Let a new model go on from the newest complete checkpoint; None if there is none.

        It may have been saved by any number of ranks, and any of the strategies for data parallel training. A damaged
        one is passed over, for the one before it. A `DataParallel` that has gone on after a loss (`--survive`) is newer
        than any: it stays as it is, and there is no `extra`.

        Args:
            model: Without a step yet, and before the first use of its weights.

        Raises:
            UsageError: On every rank: if it is no model, or the checkpoint is of another; if there are some and none
                can be read; if the model has made steps.
        """
        site = users_site()
        _check_savable(model)
        if model.steps and model.steps == self._rank.epoch.step:  # under --survive, it goes on from memory
            return Restored(step=model.steps, ranks=self._group.size, exact=True)
        if model.steps:
            raise UsageError(f"model: it has made {model.steps} steps; restore one that has made none")
        await self.finish()
        await model.wait_updates()
        newest = await self._store.newest(name="restore", site=site)
        if newest is None:
            return None
        save, _, files = newest
        about, folder, reader = files[0].about, self._store.saves.path(save), Reader(files)
        await self._check_model(folder, reader.tensors, model.tensors(), site)
        notes = {part: note for file in files for part, note in file.about.notes.items()}
        same_rank = metadata([about.ranks == self._group.size and self._part in notes], np.int8)
        agreed = await self._group.all_reduce(same_rank, op="min", stream=self._stream, name="restore", call_site=site)
        same = bool(agreed[0])
        own = await trio.to_thread.run_sync(self._read_pieces, reader, model.wanted(), files if same else [])
        part_notes = notes[self._part] if self._part in notes else next(iter(notes.values()))
        difference = model.resume(save.step, part_notes, own)
        return self._report_restored(about, difference, same=same)

    async def _check_model(self, folder: Path, saved_tensors: Tensors, tensors: Tensors, site: Site) -> None:
        """Refuse a checkpoint whose tensors are not the model's; tensors without elements do not count."""
        self._naming.check_cuts(tensors)
        saved = {name: (dtype, tuple(shape)) for name, (dtype, shape) in saved_tensors.items()}
        expected = {name: form for name, form in self._naming.tensors(tensors).items() if prod(form[1])}
        if self._naming.digest:  # others have the rest
            parts = await self._group.all_gather_object(expected, stream=self._stream, name="restore", call_site=site)
            for part in parts:
                expected |= {name: (dtype, tuple(shape)) for name, (dtype, shape) in part.items()}
        wrong = describe_difference(saved, expected)
        if wrong:
            raise UsageError(
                f"model: {folder} is of another model: {wrong}; "
                "restore the model that was saved, or name another folder"
            )

    def _read_pieces(self, reader: Reader, pieces: Sequence[Shard], files: Sequence[SavedFile]) -> Any:
        """Read the wanted pieces into the model's memory; return the state of this rank alone, None if not saved."""
        for piece in pieces:
            reader.fill(self._naming.rename_piece(piece))
        own = str(self._group.rank)
        mine = (file for file in files if own in file.about.form)
        return next((unpack_tree(file.about.form[own], file.array) for file in mine), None)

    def _report_restored(self, about: About, difference: str, *, same: bool) -> Restored:
        """Return the `Restored` of a checkpoint; if later bits will differ, the first rank prints the reasons."""
        ranks, now, reasons = about.ranks, self._group.size, [difference] if difference else []
        if ranks != now:
            reasons.append(
                f"{ranks} ranks saved it and {now} go on, and gradients that are means of other parts round differently"
            )
        elif not same:
            reasons.append("its ranks had other blocks of the model, and sums of other blocks round differently")
        why = "; ".join(reasons)
        if why and self._group.rank == 0:
            notify(
                f"checkpoint of step {about.step}: its bits are all here, those of later steps will be others: {why}"
            )
        return Restored(step=about.step, ranks=ranks, exact=not why, why=why, extra=about.extra)


def _check_savable(model: object) -> None:
    if not hasattr(model, "tensors"):
        raise UsageError(
            f"model: expected one of overlap.parallel, such as DataParallel, got {type(model).__name__}; "
            "arrays of your own are kept by rank.state.save"
        )
