"""Files of a repository of the Hub, many a commit: it takes few commits an hour, and a context has a thousand files."""

from __future__ import annotations

from typing import Any

_FILES, _BYTES = 256, 64 << 20
"""Of a commit, at most, unless one file is larger: they are held in memory until then."""


class HubCommits:
    """In one thread. What it raises is the Hub's; what was not committed then is not there.

    Args:
        system: an `HfFileSystem`.
        place: of the folder, as `resolve_path` gives it.
    """

    def __init__(self, system: Any, place: Any) -> None:
        self._system, self._place = system, place
        self._waiting: dict[str, bytes] = {}

    @classmethod
    def of(cls, system: Any, root: str) -> HubCommits | None:
        """None: `root` lies in no repository."""
        if "hf" not in system.protocol:
            return None
        place = system.resolve_path(root)
        return cls(system, place) if hasattr(place, "path_in_repo") else None  # a bucket has no commits

    def add(self, name: str, data: bytes) -> None:
        """Hold a file until there are enough of them, or `commit` is called."""
        self._waiting[name] = data
        if len(self._waiting) >= _FILES or sum(map(len, self._waiting.values())) >= _BYTES:
            self.commit()

    def commit(self) -> None:
        """All that waits is there."""
        from huggingface_hub import CommitOperationAdd, HfApi

        if not self._waiting:
            return
        place, system = self._place, self._system
        folder = f"{place.path_in_repo.rstrip('/')}/" if place.path_in_repo else ""
        HfApi(endpoint=system.endpoint, token=system.token).create_commit(
            place.repo_id,
            [CommitOperationAdd(f"{folder}{name}", data) for name, data in self._waiting.items()],
            commit_message=f"Publish a context: {len(self._waiting)} files",
            repo_type=place.repo_type,
            revision=place.revision,
        )
        self._waiting.clear()
        system.invalidate_cache(place.unresolve())
