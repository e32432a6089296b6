"""Store of saves: the files that ranks save together, and find again after a restart.

Kept between worlds: after a restart every rank goes on from the same save, the newest that is complete. Ranks exchange
the names of their files by a collective, so they need not see each other's: a folder on each machine will do as long as
the same machines come back, and one that all share lets others take their place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, TypeAlias

import numpy as np
import trio

from ..collectives.reduce import Array
from ..errors import UsageError
from ..notice import notify
from ..runtime.group import Group
from ..runtime.memory.arrays import metadata
from ..runtime.stream import Stream
from .files import About, DamagedError, SavedFile, write_file
from .saves import WHOLE, Save, Saves, complete, file_names

Site: TypeAlias = tuple[CodeType, int]  # Code and instruction
Seen: TypeAlias = "Sequence[set[int]]"  # Files of a save that a rank sees, by their numbers, rank by rank


class Store:
    """The saves of one kind in a folder, as one rank of a group uses them; its coroutines are collectives.

    Attributes:
        saves: The folders.

    Args:
        saves: The folders.
        group: The ranks that save together.
        stream: Carries the collectives by which they agree.
        real: Whether anything is kept; in virtual time ranks wait for each other, and that is all.
        keep: Number of complete saves to keep.
        note: Takes each step whose save is complete.
        drawn: Random numbers of the saves of this attempt, which stores of one rank share.
    """

    def __init__(
        self,
        saves: Saves,
        group: Group,
        stream: Stream,
        *,
        real: bool,
        keep: int,
        note: Callable[[int], None],
        drawn: set[int],
    ) -> None:
        self.saves: Saves = saves
        self._title, self._real = saves.kind.title, real
        self._group, self._stream, self._keep, self._note, self._drawn = group, stream, keep, note, drawn
        self._last: Save | None = None  # that this store has begun
        self._kept: list[Save] = []  # complete ones, the newest last
        self._known: set[Save] | None = None  # those of earlier attempts, complete or not; None: nobody has looked

    async def save(
        self,
        step: int,
        arrays: Mapping[str, Array],
        *,
        name: str,
        site: Site | None,
        saved_at: str = "",
        merge: Callable[[Sequence[SavedFile], Path], None] | None = None,
        **about: Any,
    ) -> None:
        """Write the files of all ranks; when this returns, they are on the disk, and only the newest saves are kept.

        Args:
            step: Number of the step.
            arrays: This rank's arrays, unchanged until this returns.
            name: Name of the collectives.
            site: Line that calls them.
            saved_at: That line, for an error that no line of the program raises.
            merge: Writes a file of the whole model in the place of the ranks' files; the first rank calls it.
            about: Further fields of `About`.

        Raises:
            UsageError: Another job saves in the folder; or it holds saves of another run, and nobody asked for them.
            OSError: It cannot be written.
        """
        group = self._group
        if not self._real:
            return await self._wait_for_ranks(name, site)
        await trio.to_thread.run_sync(self._check_folder)
        # The first save, or one that goes back to an earlier step, begins a row of saves with a nonce of its own.
        if self._last is None or step <= self._last.step:
            self._last = Save(step, await self._draw_nonce(f"{name} begins", site))
        save = self._last = Save(step, self._last.nonce)
        paths = [self.saves.path(save) / file for file in file_names(group.size)]
        fields = About(step=step, nonce=save.nonce, rank=group.rank, ranks=group.size, **about)
        try:
            await trio.to_thread.run_sync(write_file, paths[group.rank], arrays, fields)
        except OSError as error:
            advice = "make room there, or name another folder"
            place = f" (saved at {saved_at})" if saved_at else ""
            failure = OSError(f"{self._title} of step {step}{place} cannot be written: {error}; {advice}")
            failure.errno = error.errno
            raise failure from None
        await self._wait_for_ranks(name, site)
        if merge is not None:
            if group.rank == 0:
                await trio.to_thread.run_sync(_merge_files, paths, merge)
            await self._wait_for_ranks(name, site)
        self._kept = [*(kept for kept in self._kept if kept.step < step), save][-self._keep :]
        self._note(step)
        return await trio.to_thread.run_sync(self.saves.remove, self._is_superseded)

    async def newest(
        self, *, name: str, site: Site | None, own: bool = False
    ) -> tuple[Save, int, list[SavedFile]] | None:
        """Return the newest complete save without damage, the same on all ranks; None if there is none.

        Each file is checked by a rank that has it. The first rank prints a line on each newer save.

        Args:
            name: Name of the collectives.
            site: Line that calls them.
            own: Whether each rank needs its own file here, or all files if another number of ranks has saved.

        Returns:
            The save, the number of ranks in the names of its files, and those with pieces of models, by rank.

        Raises:
            UsageError: All saves are damaged, or of an earlier version of this package.
        """
        if not self._real:
            return None
        gather = partial(self._group.all_gather_object, stream=self._stream, name=name, call_site=site)
        offers: list[Any] = await gather(await trio.to_thread.run_sync(self._find_offer))
        # For each save, and the number of ranks that wrote it: the files that each rank sees.
        seen: dict[tuple[Save, int], list[set[int]]] = {}
        for rank, offer in enumerate(offers):
            for step, nonce, ranks, found in offer["saves"]:
                of_all = seen.setdefault((Save(step, nonce), ranks), [set() for _ in offers])
                of_all[rank] = set(found)
        damaged, whole = 0, complete({key: set().union(*of_all) for key, of_all in seen.items()})
        # From the newest on: all ranks judge a save alike, because each one sees the offers and checks of all.
        for save, ranks in sorted(seen, reverse=True):
            trouble, files = self._find_missing(save, ranks, seen[save, ranks], own=own), []
            if not trouble:
                own_check = await trio.to_thread.run_sync(self._check_files, save, ranks, seen[save, ranks])
                checked = await gather(own_check)
                trouble = next((reason for reason, _ in checked if reason), "")
                present = [header for _, headers in checked for header in headers if not trouble]
                files = [SavedFile(self.saves.path(save) / file, text) for file, text in present]
                files.sort(key=lambda file: file.about.rank)
                damaged += bool(trouble)
            if not trouble:
                self._kept = sorted({each for each, _ in whole if each <= save})[-self._keep :]
                return save, ranks, files
            if self._group.rank == 0:
                notify(f"{self._title} of step {save.step} is passed over: {trouble}")
        if damaged:
            raise UsageError(
                f"{self._title}: none of the {damaged} in {self.saves.folder} can be read; name another folder"
            )
        before = next((offer["before"] for offer in offers if offer["before"]), "")
        if before and not whole:
            raise UsageError(
                f"{self._title}: {before} is of an earlier version of overlap, which this one cannot read; go on with "
                "that version, or name another folder"
            )
        return None

    def _find_offer(self) -> dict[str, object]:
        """Return the files that are here, for the other ranks; all saves that are here now are known."""
        self._known = set(self.saves.folders())
        files = [[*save, ranks, sorted(found)] for (save, ranks), found in self.saves.find().items()]
        return {"saves": files, "before": self.saves.find_older_version()}

    def _find_missing(self, save: Save, ranks: int, seen: Seen, *, own: bool) -> str:
        """Describe the files of a save that nobody has, or that a rank lacks which needs them; "" if there are none."""
        names, folder = file_names(ranks), self.saves.path(save)
        missing = [name for number, name in enumerate(names) if number not in set().union(*seen)]
        if missing:
            lacks = f"{folder} lacks {', '.join(missing)}"
            return f"it was cut short, or files were removed: {lacks}; put them back if you can"
        for rank, found in enumerate(seen) if own else ():
            for number in ({rank} if ranks == len(seen) else set(range(ranks))) - found:
                return f"rank {rank} does not see {folder / names[number]}; copy it to the host of that rank"
        return ""

    def _check_files(self, save: Save, ranks: int, seen: Seen) -> tuple[str, list[tuple[str, bytes]]]:
        """Check this rank's share of the files of a save.

        Returns:
            The damage, "" if there is none, and the headers of the files with pieces.

        A file is checked by the rank of its number if that sees it, and else by the first that does.
        """
        headers: list[tuple[str, bytes]] = []
        for number, name in enumerate(file_names(ranks)):
            seers = [rank for rank, found in enumerate(seen) if number in found]
            if self._group.rank != (number % len(seen) if number % len(seen) in seers else seers[0]):
                continue
            try:
                file = SavedFile(self.saves.path(save) / name)
                file.check_digest()
            except (OSError, DamagedError) as error:
                return str(error), []
            about = file.about
            if (about.step, about.nonce, about.rank) != (*save, number) or (ranks != about.ranks and ranks != WHOLE):
                return f"{file.path} is a file of another save", []
            if about.notes:
                headers.append((name, file.header))
        return "", headers

    def _check_folder(self) -> None:
        """Refuse a folder that another run uses: its saves would be removed, or restored in place of ours."""
        saves, folder = self.saves.folders(), self.saves.folder
        if self._known is None:
            others = [str(self.saves.path(save)) for save in self.saves.complete() if save.nonce not in self._drawn]
            if other := next(iter(others), self.saves.find_older_version()):
                raise UsageError(
                    f"{self._title}: {other} is of another run; go on from it with {self.saves.kind.resume}, or name "
                    "another folder"
                )
            self._known = set(saves)
        strangers = [save for save in saves if save not in self._known and save.nonce not in self._drawn]
        if strangers:
            raise UsageError(
                f"{self._title}: another job saves in {folder}, too, its step {strangers[0].step}; name a folder for "
                "each job"
            )

    def _is_superseded(self, save: Save) -> bool:
        """Whether a save may be removed: no other job's, and none that a rank that is ahead may be writing."""
        assert self._known is not None
        assert self._last is not None
        ours = save in self._known or (save.nonce in self._drawn and save.step <= self._last.step)
        return ours and save not in self._kept

    async def _draw_nonce(self, name: str, site: Site | None) -> int:
        """Return a random number, the same on all ranks: no rank removes saves any more when another one has it."""
        drawn = metadata([int.from_bytes(os.urandom(8), "big") >> 2], np.int64)  # fits into a signed number
        most = await self._group.all_reduce(drawn, op="max", stream=self._stream, name=name, call_site=site)
        self._drawn.add(int(most[0]))
        return int(most[0])

    async def _wait_for_ranks(self, name: str, site: Site | None) -> None:
        await self._group.barrier(stream=self._stream, name=name, call_site=site)


def _merge_files(paths: Sequence[Path], merge: Callable[[Sequence[SavedFile], Path], None]) -> None:
    """Replace the files of all ranks by one file of the whole model.

    Raises:
        UsageError: The file of a rank is not seen here.
    """
    for rank, path in enumerate(paths):
        if not path.exists():
            raise UsageError(
                f"checkpoint: rank 0 does not see what rank {rank} has written to {path.parents[1]}; "
                "name a folder that all ranks see"
            )
    merge([SavedFile(path) for path in paths], paths[0].with_name(file_names(WHOLE)[0]))
    for path in paths:
        path.unlink()
