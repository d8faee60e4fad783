"""The part of a Ray cluster that an experiment uses, and this process as a driver of it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, first_line

LOCAL = "local"
MAX_WORKERS = 1000
_USING = threading.Lock()
_USERS: list[str] = []
"""Addresses that are in use, once for each user: Ray is one for a process."""


@dataclass(frozen=True, slots=True)
class Pool:
    """How much of a cluster is used.

    Attributes:
        address: `local` for a Ray of this machine's own, else as Ray takes it.
        workers: how many; None = as many as there is room for.
        cpus, gpus: of each worker; None = all cores of a node, and a GPU where there is one.
    """

    address: str
    workers: int | None = None
    cpus: int | None = None
    gpus: float | None = None


# ---- Ray itself


def worker_capacity(pool: Pool) -> tuple[float, int, int]:
    """GPUs and cores of a worker, and how many workers there is room for.

    Raises:
        ConfigError: the cluster has no room for as many.
    """
    import ray

    nodes = [
        (int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]
    num_cores, num_cards = (sum(counts) for counts in zip(*nodes, strict=True))
    gpus = pool.gpus if pool.gpus is not None else float(num_cards > 0)
    cpus = pool.cpus
    if cpus is None and pool.workers is not None and not gpus:
        cpus = max(1, num_cores // pool.workers)
    elif cpus is None:
        shares = [c // max(1, int(g // gpus)) if gpus else c for c, g in nodes if g >= gpus]
        cpus = min(filter(None, shares), default=1)
    room = sum(int(min(c // cpus, g // gpus if gpus else c)) for c, g in nodes)
    size = room if pool.workers is None else pool.workers
    if not 0 < size <= room:
        raise ConfigError(
            f"The cluster has {num_cores} cores and {num_cards} GPUs: room for {room} workers "
            f"of {cpus} cores and {gpus:g} GPUs, not for {size}. Ask for fewer or smaller "
            "workers."
        )
    return gpus, cpus, size


def check_installed() -> None:
    """Raises ConfigError: Ray is not there."""
    if find_spec("ray") is None:
        raise ConfigError(
            "Ray is not installed. Install it: pip install 'speculative-decoding-playground[ray]'."
        )


def pool_of(address: object, num: object, offered: Collection[str]) -> Pool | None:
    """The workers that a page asks for; None = it runs in this process.

    Raises:
        ConfigError: this address is not offered, or there is no Ray.
    """
    if not address:
        return None
    if not isinstance(address, str) or address not in offered:
        known = ", ".join(offered)
        raise ConfigError(
            f"Run on must be this machine or Ray at one of {known}, got {address!r:.60}. Start the "
            "server with --ray ADDRESS to offer another cluster."
        )
    check_installed()
    if num is not None and not (isinstance(num, int) and 1 <= num <= MAX_WORKERS):
        raise ConfigError(f"Workers must be a number in [1, {MAX_WORKERS}], got {num!r:.40}.")
    return Pool(address, num)


@contextmanager
def connected(address: str, *, cpus: int | None = None) -> Iterator[None]:
    """This process as a driver of a cluster, until the last of those who use it is done.

    Args:
        cpus: cores that a local one counts with; by default all.

    Raises:
        ConfigError: there is no Ray, no cluster at the address, or another one is in use.
    """
    check_installed()
    # Ray asks for these in the environment only: report nothing home, leave device choice to us.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    token = Path.home() / ".ray" / "auth_token"
    if address != LOCAL and "ray" not in sys.modules and token.exists():
        # `ray start` asks for it where there is one, and Ray shows it to others only if told so
        # before it is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    with _USING:
        _join(address, cpus)
        _USERS.append(address)
    try:
        yield
    finally:
        with _USING:
            _USERS.remove(address)
            if not _USERS:
                import ray

                ray.shutdown()


def _join(address: str, cpus: int | None) -> None:
    import ray

    if ray.is_initialized():
        if address not in _USERS:
            raise ConfigError(
                f"An experiment is running on Ray at {', '.join(_USERS)}. Wait until it is done: a "
                "process uses one cluster at a time."
            )
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        quiet |= {"include_dashboard": False, "num_cpus": cpus}
    try:
        ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ConfigError(
            f"No Ray cluster answers at {address!r:.100}: {first_line(error)}. Start one with "
            "ray start --head, or give local."
        ) from error
