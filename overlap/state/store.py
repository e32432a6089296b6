"""Store of saves: files that ranks write together, and find again after a restart.

After a restart every rank continues from the same save, the newest that is complete. Ranks exchange the names of the
files that they see by a collective, so they need not see each other's files: a local folder on each host is enough if
the same hosts come back. With a shared folder, other hosts can take their place.
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
from .files import DamagedError, FileFacts, SavedFile, write_file
from .saves import WHOLE, Save, Saves, complete_saves, file_names

Site: TypeAlias = tuple[CodeType, int]  # A line of a program: code object, and index of the instruction
Seen: TypeAlias = "Sequence[set[int]]"  # For each rank of the group, the numbers of the files of a save that it sees


class Store:
    """The saves of one kind in a folder, as one rank of a group uses them. All async methods are collectives.

    Args:
        saves: The folder of the saves, and their kind.
        group: The ranks that save together.
        stream: Stream of the collectives by which the ranks agree.
        real: Whether time is real; in virtual time nothing is written, and ranks only wait for each other.
        keep: Number of complete saves to keep.
        note: Function that is called with each step whose save is complete.
        drawn: Random numbers (nonces) of the saves of this attempt; all stores of a rank share this set.

    Attributes:
        saves: The folder of the saves, and their kind.
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
        self._group, self._stream, self._keep, self._note, self._drawn_nonces = group, stream, keep, note, drawn
        self._last_save: Save | None = None  # the last save that this store has begun
        self._kept_saves: list[Save] = []  # complete saves that must not be removed, the newest last
        # Saves of earlier attempts, complete or not; None: neither `find_newest` nor `save` was called.
        self._known_saves: set[Save] | None = None

    async def save(
        self,
        step: int,
        arrays: Mapping[str, Array],
        *,
        name: str,
        site: Site | None,
        saved_at: str = "",
        merge: Callable[[Sequence[SavedFile], Path], None] | None = None,
        **facts: Any,
    ) -> None:
        """Write this rank's file; when this returns, the files of all ranks are on the disk. Older saves are removed.

        Args:
            step: Number of the step.
            arrays: This rank's arrays, by name; they must not change until this returns.
            name: Name of the collectives in timelines.
            site: Line of the program to which the collectives belong.
            saved_at: That line as text, for the error of a save that runs in a background task.
            merge: `merge(files, path)` writes one file of the whole model; it then replaces the files of the ranks. The
                first rank calls it. None: the files of the ranks stay.
            facts: Further fields of `FileFacts`.

        Raises:
            UsageError: Another job saves in the folder; or the folder has saves of another run, and `find_newest` was
                not called.
            OSError: The file cannot be written.
        """
        group = self._group
        if not self._real:
            return await self._wait_for_ranks(name, site)
        await trio.to_thread.run_sync(self._check_folder_is_ours)
        # The first save, and a save of an earlier step than the last one, draw a new nonce; the others keep it.
        if self._last_save is None or step <= self._last_save.step:
            self._last_save = Save(step, await self._draw_nonce(f"{name} begins", site))
        save = self._last_save = Save(step, self._last_save.nonce)
        paths = [self.saves.folder_of(save) / file for file in file_names(group.size)]
        fields = FileFacts(step=step, nonce=save.nonce, rank=group.rank, ranks=group.size, **facts)
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
        self._kept_saves = [*(kept for kept in self._kept_saves if kept.step < step), save][-self._keep :]
        self._note(step)
        return await trio.to_thread.run_sync(self.saves.remove, self._is_superseded)

    async def find_newest(
        self, *, name: str, site: Site | None, own: bool = False
    ) -> tuple[Save, int, list[SavedFile]] | None:
        """Return the newest complete save without damage, the same on all ranks, or None if there is none.

        Each file is checked by a rank that sees it. For each newer save, the first rank prints why it is passed over.

        Args:
            name: Name of the collectives in timelines.
            site: Line of the program to which the collectives belong.
            own: Whether each rank must see its own file; if another number of ranks has saved, all files.

        Returns:
            The save; the number of ranks in its file names, or `WHOLE`; and its files that have pieces of a model,
            ordered by the rank that wrote them.

        Raises:
            UsageError: All complete saves are damaged, or all saves are of an earlier version of this package.
        """
        if not self._real:
            return None
        gather = partial(self._group.all_gather_object, stream=self._stream, name=name, call_site=site)
        offers: list[Any] = await gather(await trio.to_thread.run_sync(self._list_visible_files))
        seen = _files_by_save(offers)
        complete = complete_saves({key: set().union(*of_all) for key, of_all in seen.items()})
        damages: list[str] = []  # of complete saves, the newest first
        # All ranks come to the same result for each save, because each rank sees the offers and checks of all.
        for save, ranks in sorted(seen, reverse=True):
            trouble = self._describe_missing_files(save, ranks, seen[save, ranks], own=own)
            if not trouble:
                own_check = await trio.to_thread.run_sync(self._check_share_of_files, save, ranks, seen[save, ranks])
                trouble, files = self._join_file_checks(save, await gather(own_check))
                if not trouble:
                    self._kept_saves = sorted({each for each, _ in complete if each <= save})[-self._keep :]
                    return save, ranks, files
                damages.append(trouble)
            if self._group.rank == 0:
                notify(f"{self._title} of step {save.step} is passed over: {trouble}")
        if damages:
            raise UsageError(
                f"{self._title}: none of the {len(damages)} in {self.saves.folder} can be read ({damages[0]}); "
                "name another folder"
            )
        before = next((offer["before"] for offer in offers if offer["before"]), "")
        if before and not complete:
            raise UsageError(
                f"{self._title}: {before} is of an earlier version of overlap, which this one cannot read; go on with "
                "that version, or name another folder"
            )
        return None

    def _list_visible_files(self) -> dict[str, object]:
        """Return the files that this rank sees, for the other ranks: see `_files_by_save`. Sets `_known_saves`.

        The entry "before" is the path of a save by an earlier version of this package, or "".
        """
        self._known_saves = set(self.saves.begun_saves())
        files = [[*save, ranks, sorted(found)] for (save, ranks), found in self.saves.find_files().items()]
        return {"saves": files, "before": self.saves.find_older_version()}

    def _describe_missing_files(self, save: Save, ranks: int, seen: Seen, *, own: bool) -> str:
        """Return a sentence on missing files of a save; "" if there are none.

        A file is missing if no rank sees it. With `own`, each rank must see its own file, or all files if another
        number of ranks has saved.
        """
        names, folder = file_names(ranks), self.saves.folder_of(save)
        missing = [name for number, name in enumerate(names) if number not in set().union(*seen)]
        if missing:
            lacks = f"{folder} lacks {', '.join(missing)}"
            return f"it was cut short, or files were removed: {lacks}; put them back if you can"
        for rank, found in enumerate(seen) if own else ():
            for number in ({rank} if ranks == len(seen) else set(range(ranks))) - found:
                return f"rank {rank} does not see {folder / names[number]}; copy it to the host of that rank"
        return ""

    def _check_share_of_files(self, save: Save, ranks: int, seen: Seen) -> tuple[str, list[tuple[str, bytes]]]:
        """Check this rank's share of a save's files; return a sentence on damage, or "", and files with pieces.

        File n is checked by rank n (modulo the number of ranks) if that rank sees it, else by the first rank that does.
        Of each file with pieces of a model, the name and the header are returned.
        """
        headers: list[tuple[str, bytes]] = []
        for number, name in enumerate(file_names(ranks)):
            seers = [rank for rank, found in enumerate(seen) if number in found]
            checker = number % len(seen)  # more ranks may have saved than there are now
            if self._group.rank != (checker if checker in seers else seers[0]):
                continue
            try:
                file = SavedFile(self.saves.folder_of(save) / name)
                file.check_digest()
            except (OSError, DamagedError) as error:
                return str(error), []
            facts = file.facts
            if (facts.step, facts.nonce, facts.rank) != (*save, number) or (ranks != facts.ranks and ranks != WHOLE):
                return f"{file.path} is a file of another save", []
            if facts.notes:
                headers.append((name, file.header))
        return "", headers

    def _join_file_checks(
        self, save: Save, checks: Sequence[tuple[str, list[tuple[str, bytes]]]]
    ) -> tuple[str, list[SavedFile]]:
        """Return the first damage that a rank has found, or "", and the files with pieces, in the order of ranks."""
        trouble = next((damage for damage, _ in checks if damage), "")
        if trouble:
            return trouble, []
        files = [
            SavedFile(self.saves.folder_of(save) / name, header) for _, headers in checks for name, header in headers
        ]
        return "", sorted(files, key=lambda file: file.facts.rank)

    def _check_folder_is_ours(self) -> None:
        """Refuse a folder that another run uses: its saves would be removed, or restored in the place of ours.

        The `UsageError` means that the folder has saves of another run, and `find_newest` was not called, or that
        another job has saved there since.
        """
        saves, folder = self.saves.begun_saves(), self.saves.folder
        if self._known_saves is None:
            others = [
                str(self.saves.folder_of(save))
                for save in self.saves.list_complete()
                if save.nonce not in self._drawn_nonces
            ]
            if other := next(iter(others), self.saves.find_older_version()):
                raise UsageError(
                    f"{self._title}: {other} is of another run; go on from it with {self.saves.kind.resume}, or name "
                    "another folder"
                )
            self._known_saves = set(saves)
        strangers = [save for save in saves if save not in self._known_saves and save.nonce not in self._drawn_nonces]
        if strangers:
            raise UsageError(
                f"{self._title}: another job saves in {folder}, too, its step {strangers[0].step}; name a folder for "
                "each job"
            )

    def _is_superseded(self, save: Save) -> bool:
        """Whether a save may be removed.

        Saves in `_kept_saves` may not, nor saves of other jobs, nor a save that a faster rank may already be writing.
        """
        assert self._known_saves is not None
        assert self._last_save is not None
        ours = save in self._known_saves or (save.nonce in self._drawn_nonces and save.step <= self._last_save.step)
        return ours and save not in self._kept_saves

    async def _draw_nonce(self, name: str, site: Site | None) -> int:
        """Return a random number, the same on all ranks, and add it to the numbers of this attempt.

        A collective: each rank draws a number, and the greatest counts. When it returns, all ranks have called it, so
        no rank still removes earlier saves.
        """
        drawn = metadata([int.from_bytes(os.urandom(8), "big") >> 2], np.int64)  # shifted, to fit into a signed number
        most = await self._group.all_reduce(drawn, op="max", stream=self._stream, name=name, call_site=site)
        self._drawn_nonces.add(int(most[0]))
        return int(most[0])

    async def _wait_for_ranks(self, name: str, site: Site | None) -> None:
        """Wait until all ranks of the group have called this; `name` and `site` are for timelines."""
        await self._group.barrier(stream=self._stream, name=name, call_site=site)


def _files_by_save(offers: Sequence[Any]) -> dict[tuple[Save, int], list[set[int]]]:
    """Return, for each save and number of ranks in its file names, the numbers of the files that each rank sees.

    The "saves" of each rank's offer are lists of step, nonce, number of ranks in the file names, and numbers of files.
    """
    seen: dict[tuple[Save, int], list[set[int]]] = {}
    for rank, offer in enumerate(offers):
        for step, nonce, ranks, found in offer["saves"]:
            of_all = seen.setdefault((Save(step, nonce), ranks), [set() for _ in offers])
            of_all[rank] = set(found)
    return seen


def _merge_files(paths: Sequence[Path], merge: Callable[[Sequence[SavedFile], Path], None]) -> None:
    """Replace the files of all ranks by one file of the whole model, which `merge(files, path)` writes.

    Raises a `UsageError` if this process does not see the file of a rank.
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
