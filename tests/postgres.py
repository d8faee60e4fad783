"""A PostgreSQL server of the tests' own: on a free port, in a private folder, gone afterwards."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from storage import RunLog

FAST = {"fsync": "off", "full_page_writes": "off"}
"""No test survives the machine's crash, so none waits for its disk."""


def programs() -> Path | None:
    """The folder of `initdb` and `postgres`: on the path, or where Debian keeps them."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((one for one in folders if (one / "postgres").exists()), None)


def missing() -> str | None:
    """Why no server can be started here."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed: pip install -e '.[test]'"
    if programs() is None:
        return "no PostgreSQL server here: apt-get install postgresql"
    return None


class Server:
    """One cluster; trusts whoever reaches it, which is this machine alone.

    Attributes:
        folder: its data; the server itself writes `log` there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._user: str | None = None
        if os.geteuid() == 0:  # the server refuses to run as root
            names = {user.pw_name for user in pwd.getpwall()}
            self._user = "postgres" if "postgres" in names else "nobody"
            shutil.chown(folder, self._user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._call("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
        # Kept: for a connection of its own, each statement would take twice as long.
        self._admin = sa.create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")

    def _call(self, program: str, *words: str) -> None:
        """Run one of PostgreSQL's programs on the cluster."""
        folder = programs()
        assert folder is not None
        subprocess.run(
            [folder / program, "-D", self.folder / "data", *words],
            user=self._user,
            cwd=self.folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = {"listen_addresses": "127.0.0.1", "port": self.port, **FAST}
        settings["unix_socket_directories"] = str(self.folder)
        options = " ".join(f"-c {key}={value}" for key, value in settings.items())
        self._call("pg_ctl", "start", "-w", "-l", str(self.folder / "log"), "-o", options)

    def stop(self) -> None:
        """Stop it at once, as a lost server does: sessions are cut, nothing is said to them."""
        self._admin.dispose()
        self._call("pg_ctl", "stop", "-m", "immediate")

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"

    @contextmanager
    def database(self, template: str = "template1") -> Iterator[str]:
        """The URL of a new database, which is dropped at the end."""
        name = f"runs_{secrets.token_hex(6)}"
        self._run(f"CREATE DATABASE {name} TEMPLATE {template}")
        yield self.url(name)
        self._run(f"DROP DATABASE {name} WITH (FORCE)")

    def make_template(self, name: str) -> None:
        """An empty run log to copy databases from: much faster than to create it."""
        self._run(f"CREATE DATABASE {name}")
        RunLog.open(self.url(name)).close()

    def _run(self, statement: str) -> None:
        with self._admin.connect() as connection:
            connection.execute(sa.text(statement))


@contextmanager
def server() -> Iterator[Server]:
    """A running server."""
    # Not among pytest's own folders: those are closed to the user that the server runs as.
    with tempfile.TemporaryDirectory(prefix="runs-pg-") as folder:
        found = Server(Path(folder))
        found.start()
        try:
            yield found
        finally:
            found.stop()
