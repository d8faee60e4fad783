"""Artifacts in the log: latency curves, rank tables, saved trees, under a kind and a key."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from datetime import UTC
from typing import Any

import sqlalchemy as sa

from storage import codec, owner
from storage.database import Database
from storage.errors import StorageError, UnknownArtifactError
from storage.records import Artifact
from storage.schema import artifacts

MAX_KIND_CHARS = 64


class Artifacts:
    """The artifacts of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(
        self,
        kind: str,
        key: Mapping[str, Any],
        *,
        meta: Mapping[str, Any],
        payload: bytes,
        run_id: str | None = None,
        benchmark_id: str | None = None,
    ) -> str:
        """Keep bytes under a kind and a key; returns the artifact's id.

        One that belongs to no run and no benchmark replaces an older such one of the same kind
        and key.

        Raises:
            StorageError: the kind is empty or too long, or there is no such run or benchmark.
        """
        if not 1 <= len(kind) <= MAX_KIND_CHARS:
            raise StorageError(f"kind must have 1 to {MAX_KIND_CHARS} characters, got {kind!r}.")
        artifact_id = secrets.token_hex(8)
        digest = _digest(key)
        with self._database.transaction() as connection:
            if run_id is None and benchmark_id is None:
                connection.execute(
                    artifacts.delete().where(
                        artifacts.c.kind == kind,
                        artifacts.c.key_digest == digest,
                        artifacts.c.run_id.is_(None),
                        artifacts.c.benchmark_id.is_(None),
                    )
                )
            connection.execute(
                artifacts.insert().values(
                    id=artifact_id,
                    kind=kind,
                    key_digest=digest,
                    key=codec.dump(key),
                    meta=codec.dump(meta),
                    run_id=run_id,
                    benchmark_id=benchmark_id,
                    created_at=owner.now(),
                    payload=payload,
                )
            )
        return artifact_id

    def find(
        self,
        kind: str,
        key: Mapping[str, Any] | None = None,
        *,
        run_id: str | None = None,
        benchmark_id: str | None = None,
    ) -> tuple[Artifact, ...]:
        """Those of a kind, newest first; None lets every key, run and benchmark through."""
        conditions = [artifacts.c.kind == kind]
        if key is not None:
            conditions.append(artifacts.c.key_digest == _digest(key))
        if run_id is not None:
            conditions.append(artifacts.c.run_id == run_id)
        if benchmark_id is not None:
            conditions.append(artifacts.c.benchmark_id == benchmark_id)
        columns = [column for column in artifacts.c if column.name != "payload"]
        wanted = sa.select(*columns).where(*conditions)
        newest = wanted.order_by(artifacts.c.created_at.desc(), artifacts.c.id)
        with self._database.transaction(reading=True) as connection:
            return tuple(_artifact(row) for row in connection.execute(newest))

    def payload(self, artifact_id: str) -> bytes:
        """Its bytes.

        Raises:
            UnknownArtifactError: no such artifact.
        """
        wanted = sa.select(artifacts.c.payload).where(artifacts.c.id == artifact_id)
        with self._database.transaction(reading=True) as connection:
            row = connection.execute(wanted).one_or_none()
        if row is None:
            raise UnknownArtifactError(f"No artifact {artifact_id!r:.80} is in the log.")
        return bytes(row.payload)

    def delete(self, artifact_id: str) -> None:
        """Remove it for good.

        Raises:
            UnknownArtifactError: no such artifact.
        """
        with self._database.transaction() as connection:
            gone = connection.execute(artifacts.delete().where(artifacts.c.id == artifact_id))
            if gone.rowcount == 0:
                raise UnknownArtifactError(f"No artifact {artifact_id!r:.80} is in the log.")


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(codec.canonical(key).encode()).hexdigest()


def _artifact(row: sa.Row[Any]) -> Artifact:
    return Artifact(
        id=row.id,
        kind=row.kind,
        key=codec.load(row.key),
        meta=codec.load(row.meta),
        created_at=row.created_at.replace(tzinfo=UTC),
        run_id=row.run_id,
        benchmark_id=row.benchmark_id,
    )
